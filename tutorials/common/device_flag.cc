#include "lockstep/tutorials/common/device_flag.h"

#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "lockstep/comm/nccl/create.h"

namespace lockstep::tutorials {

struct DeviceChoice {
  std::string value;
};

bool AbslParseFlag(absl::string_view text, DeviceChoice* choice, std::string* error) {
  choice->value = std::string(text);
  if (choice->value == "auto" || choice->value == "cpu") return true;
  if (choice->value != "cuda") {
    *error = "choose auto, cpu or cuda";
    return false;
  }
  const absl::Status usable = comm::nccl::CheckDevices();
  *error = absl::StrCat(std::string{usable.message()}, "; or use --device=cpu");
  return usable.ok();
}

std::string AbslUnparseFlag(const DeviceChoice& choice) { return choice.value; }

}  // namespace lockstep::tutorials

ABSL_FLAG(lockstep::tutorials::DeviceChoice, device, {"auto"},
          "where to compute: auto, cpu or cuda; auto is cuda where there is a GPU");

namespace lockstep::tutorials {

at::Device ChosenDevice() {
  const std::string choice = absl::GetFlag(FLAGS_device).value;
  const bool cuda = choice == "cuda" || (choice == "auto" && comm::nccl::CountDevices() > 0);
  return cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
}

}  // namespace lockstep::tutorials
