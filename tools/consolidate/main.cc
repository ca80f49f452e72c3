// Makes one safetensors file of a checkpoint.
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "lockstep/parallel/checkpoint/consolidate.h"
#include "lockstep/tutorials/common/run_main.h"

ABSL_FLAG(std::string, checkpoint, "",
          "folder of a checkpoint, or of a training, whose newest checkpoint is taken");
ABSL_FLAG(std::string, output, "", "safetensors file to write");

namespace lockstep {
namespace {

absl::Status Run() {
  const std::string checkpoint = absl::GetFlag(FLAGS_checkpoint);
  const std::string output = absl::GetFlag(FLAGS_output);
  if (checkpoint.empty() || output.empty()) {
    return absl::InvalidArgumentError("give both --checkpoint=FOLDER and --output=FILE");
  }
  return parallel::checkpoint::Consolidate(checkpoint, output);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::tutorials::RunMain(
      argc, argv,
      {.summary = "writes the model of a checkpoint, of however many ranks, into one safetensors "
                  "file that Python reads by name.",
       .example = "bazel run //tools:consolidate -- --checkpoint=runs/a --output=a.safetensors"},
      lockstep::Run);
}
