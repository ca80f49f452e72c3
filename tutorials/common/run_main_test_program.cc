// What run_main_test runs, in one process.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <iostream>
#include <new>
#include <stdexcept>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/device_flag.h"
#include "lockstep/tutorials/common/flag_types.h"
#include "lockstep/tutorials/common/run_main.h"
#include "lockstep/tutorials/common/training_flags.h"

ABSL_FLAG(std::string, fail, "", "how to fail: status, throw, torch, exception or memory");
ABSL_FLAG(lockstep::tutorials::Count, epochs, 3,
          "passes over the training images, of which there are more than a line of text has room "
          "for");
ABSL_FLAG(bool, shout, false, "print in capitals");

namespace lockstep::tutorials {
namespace {

// Would hang the program if it ran: failures skip it.
struct Hanging {
  bool active = false;
  ~Hanging() {
    if (active) pause();
  }
} hanging;

absl::Status Body() {
  const std::string fail = absl::GetFlag(FLAGS_fail);
  std::cout << absl::StrCat(absl::GetFlag(FLAGS_shout) ? "EPOCHS " : "epochs ",
                            absl::GetFlag(FLAGS_epochs).value, " batch ",
                            absl::GetFlag(FLAGS_batch).value, " lr ", absl::GetFlag(FLAGS_lr).value,
                            " seed ", absl::GetFlag(FLAGS_seed), " device ", ChosenDevice().str())
            << "\n";
  hanging.active = !fail.empty();
  if (fail == "status") return absl::NotFoundError("no file x: make one");
  if (fail == "throw") throw StatusError(absl::DataLossError("file x is cut off"));
  if (fail == "torch") TORCH_CHECK(false, "shapes differ:\n2 and 3");
  if (fail == "exception") throw std::runtime_error("first line\nsecond line");
  if (fail == "memory") throw std::bad_alloc();
  return absl::OkStatus();
}

}  // namespace
}  // namespace lockstep::tutorials

int main(int argc, char** argv) {
  return lockstep::tutorials::RunMain(
      argc, argv, {.summary = "fails as it is told.", .example = "run_main_test_program --batch=2"},
      lockstep::tutorials::Body);
}
