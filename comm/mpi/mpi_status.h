#pragma once

#include <mpi.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace lockstep::comm::mpi {

// The Status of an MPI call: Internal, with the expression that failed and MPI's own text.
inline absl::Status ToStatus(int code, const char* expression) {
  if (code == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return absl::InternalError(absl::StrCat(expression, ": ", std::string(text, length)));
}

}  // namespace lockstep::comm::mpi

#define LOCKSTEP_MPI_STATUS(call) ::lockstep::comm::mpi::ToStatus((call), #call)

// Returns from the calling function, with an absl::Status, if the MPI call fails.
#define LOCKSTEP_MPI_RETURN_IF_ERROR(call)                                      \
  do {                                                                          \
    if (const int lockstep_mpi_code = (call); lockstep_mpi_code != MPI_SUCCESS) \
      return ::lockstep::comm::mpi::ToStatus(lockstep_mpi_code, #call);         \
  } while (false)
