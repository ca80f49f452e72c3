#pragma once

#include "lockstep/parallel/ddp/ddp.h"

namespace lockstep::parallel {

struct JoinOptions {
  // Averages over the ranks that still have batches, so that each sample weighs the same; else over
  // all ranks, as PyTorch does unless told otherwise; false.
  bool divide_by_active_ranks = false;
};

// Lets ranks run different numbers of backwards under one Ddp. Without it, a rank that runs out of
// batches leaves the others waiting for it.
//
//   {
//     parallel::Join join(ddp);
//     for (auto& batch : loader) {              // shorter on some ranks
//       ... loss.backward(); optimizer.step();
//     }
//     join.Finish();                            // returns when all ranks are here
//   }
//
// In Finish() a rank takes part in the others' backwards with gradients of zero. When all are
// there, the parameters and buffers of a rank that took the last step are copied to all; the
// optimizer's state is not, so that it stays behind on ranks that ended earlier. Buffers come from
// the first rank that still has batches. After it gradients are unspecified. Backwards under
// NoSync() need no partner. Each backward waits once for all ranks, to learn who takes part.
//
// All ranks make a Join at the same place, at most one for a Ddp at a time, which must outlive it.
// Destroyed without Finish(), by an exception say, it leaves the others waiting until that rank's
// Ddp is destroyed or fails. Errors: StatusError.
class Join {
 public:
  explicit Join(Ddp& ddp, JoinOptions options = {});
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  void Finish();

 private:
  Ddp& ddp_;
  const int64_t first_step_;
};

}  // namespace lockstep::parallel
