#include "lockstep/comm/mpi/rendezvous.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "lockstep/comm/mpi/mpi_status.h"

namespace lockstep::comm::mpi {
namespace {

constexpr absl::Duration kConnectTimeout = absl::Minutes(1);

// What rank 0 broadcasts: where it serves, or why it does not.
struct Address {
  char host[256] = "";
  int port = 0;
  char error[256] = "";
};

void CopyText(char (&to)[256], const std::string& from) {
  std::strncpy(to, from.c_str(), sizeof(to) - 1);
}

absl::StatusOr<bool> OneNode(MPI_Comm comm) {
  MPI_Comm node = MPI_COMM_NULL;
  LOCKSTEP_MPI_RETURN_IF_ERROR(
      MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, /*key=*/0, MPI_INFO_NULL, &node));
  int all = 0;
  int here = 0;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_size(comm, &all));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_size(node, &here));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_free(&node));
  int one_node = here == all ? 1 : 0;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Allreduce(MPI_IN_PLACE, &one_node, 1, MPI_INT, MPI_MIN, comm));
  return one_node != 0;
}

std::string HostForOthers(bool one_node) {
  const char* chosen = std::getenv("LOCKSTEP_STORE_HOST");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  if (one_node) return "127.0.0.1";
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Store>> MeetAtStore(MPI_Comm comm) {
  // Other ranks may still ask when this one has no communicator any more.
  static auto* served = new std::vector<std::shared_ptr<Store>>;
  absl::StatusOr<bool> one_node = OneNode(comm);
  if (!one_node.ok()) return one_node.status();
  int rank = 0;
  int size = 0;
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_rank(comm, &rank));
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Comm_size(comm, &size));
  if (size == 1) return Store::InProcess();
  Address address;
  std::shared_ptr<Store> store;
  if (rank == 0) {
    CopyText(address.host, HostForOthers(*one_node));
    absl::StatusOr<std::shared_ptr<Store>> serving = Store::Serve(/*port=*/0);
    if (serving.ok()) {
      store = *std::move(serving);
      served->push_back(store);
      address.port = store->port();
    } else {
      CopyText(address.error, std::string{serving.status().message()});
    }
  }
  LOCKSTEP_MPI_RETURN_IF_ERROR(MPI_Bcast(&address, sizeof(address), MPI_BYTE, /*root=*/0, comm));
  if (address.error[0] != '\0') {
    return absl::UnavailableError(absl::StrCat("rank 0: ", address.error));
  }
  if (rank == 0) return store;
  absl::StatusOr<std::shared_ptr<Store>> connected =
      Store::Connect(address.host, address.port, kConnectTimeout);
  if (connected.ok()) return connected;
  return absl::UnavailableError(absl::StrCat(
      std::string{connected.status().message()},
      " (rank 0 serves it; set LOCKSTEP_STORE_HOST to a name or address of rank 0's node that all "
      "nodes reach)"));
}

}  // namespace lockstep::comm::mpi
