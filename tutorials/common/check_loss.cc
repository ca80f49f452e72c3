#include "lockstep/tutorials/common/check_loss.h"

#include <cmath>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tutorials/common/training_flags.h"

namespace lockstep::tutorials {

void CheckLoss(double loss, int64_t step, int64_t epoch) {
  if (std::isfinite(loss)) return;
  throw StatusError(absl::OutOfRangeError(absl::StrFormat(
      "the loss of step %d in epoch %d is no number any more: try a smaller --lr than %g", step,
      epoch, absl::GetFlag(FLAGS_lr).value)));
}

}  // namespace lockstep::tutorials
