#include "lockstep/tutorials/common/device_flag.h"

#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/string_view.h"

namespace lockstep::tutorials {

struct DeviceChoice {
  std::string value;
};

bool AbslParseFlag(absl::string_view text, DeviceChoice* choice, std::string* error) {
  choice->value = std::string(text);
  if (choice->value == "auto" || choice->value == "cpu") return true;
  *error = choice->value == "cuda" ? "this program runs on the CPU only: use --device=cpu"
                                   : "choose auto or cpu";
  return false;
}

std::string AbslUnparseFlag(const DeviceChoice& choice) { return choice.value; }

}  // namespace lockstep::tutorials

ABSL_FLAG(lockstep::tutorials::DeviceChoice, device, {"auto"}, "where to compute: auto or cpu");

namespace lockstep::tutorials {

at::Device ChosenDevice() {
  // Both values that were let in mean the same.
  return at::Device(at::kCPU);
}

}  // namespace lockstep::tutorials
