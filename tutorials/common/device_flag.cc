#include "lockstep/tutorials/common/device_flag.h"

#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "lockstep/comm/nccl/create.h"

namespace lockstep::tutorials {

enum class DeviceChoice { kAuto, kCpu, kCuda };

bool AbslParseFlag(absl::string_view text, DeviceChoice* choice, std::string* error) {
  if (text == "auto" || text == "cpu") {
    *choice = text == "auto" ? DeviceChoice::kAuto : DeviceChoice::kCpu;
    return true;
  }
  if (text != "cuda") {
    *error = "choose auto, cpu or cuda";
    return false;
  }
  *choice = DeviceChoice::kCuda;
  const absl::Status usable = comm::nccl::CheckDevices();
  *error = absl::StrCat(std::string{usable.message()}, "; or use --device=cpu");
  return usable.ok();
}

std::string AbslUnparseFlag(DeviceChoice choice) {
  if (choice == DeviceChoice::kAuto) return "auto";
  return choice == DeviceChoice::kCpu ? "cpu" : "cuda";
}

}  // namespace lockstep::tutorials

ABSL_FLAG(lockstep::tutorials::DeviceChoice, device, lockstep::tutorials::DeviceChoice::kAuto,
          "where to compute: auto, cpu or cuda; auto is cuda where there is a GPU");

namespace lockstep::tutorials {

at::Device ChosenDevice() {
  const DeviceChoice choice = absl::GetFlag(FLAGS_device);
  const bool cuda = choice == DeviceChoice::kCuda ||
                    (choice == DeviceChoice::kAuto && comm::nccl::CountDevices() > 0);
  return cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
}

}  // namespace lockstep::tutorials
