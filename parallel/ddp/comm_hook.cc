#include "lockstep/parallel/ddp/comm_hook.h"

#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::ddp {

void AllReduceHook::SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) {
  buckets_ = buckets;
  comm_ = &comm;
  works_.assign(buckets.size(), comm::Work());
}

void AllReduceHook::Start(size_t bucket) {
  works_[bucket] = comm_->AllReduce(buckets_[bucket].flat(), comm::ReduceOp::kAverage);
}

void AllReduceHook::Finish() {
  for (const comm::Work& work : works_) ThrowIfError(work.Wait());
}

}  // namespace lockstep::parallel::ddp
