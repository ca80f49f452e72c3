#include "lockstep/parallel/ddp/half_hook.h"

#include "absl/strings/str_cat.h"
#include "lockstep/tools/status/status_error.h"
#include "lockstep/tools/trace/memory.h"

namespace lockstep::parallel::ddp {

HalfHook::HalfHook(at::ScalarType dtype) : dtype_(dtype) {
  if (dtype == at::kHalf || dtype == at::kBFloat16) return;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("HalfHook: ", c10::toString(dtype), " is neither Half nor BFloat16")));
}

std::string HalfHook::name() const { return absl::StrCat("to ", c10::toString(dtype_)); }

void HalfHook::SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) {
  buckets_ = buckets;
  comm_ = &comm;
  works_.assign(buckets.size(), comm::Work());
  sent_.clear();
  trace::MemoryScope scope(trace::MemoryCategory::kBuckets);
  for (const Bucket& bucket : buckets) {
    const at::Tensor& flat = bucket.flat();
    sent_.push_back(flat.element_size() <= 2 ? flat : comm.Empty(flat.sizes(), dtype_));
  }
}

void HalfHook::Start(size_t bucket) {
  const at::Tensor& flat = buckets_[bucket].flat();
  if (!sent_[bucket].is_same(flat)) sent_[bucket].copy_(flat);
  works_[bucket] = comm_->AllReduce(sent_[bucket], comm::ReduceOp::kAverage);
}

void HalfHook::Finish() {
  for (size_t bucket = 0; bucket < works_.size(); ++bucket) {
    ThrowIfError(works_[bucket].Wait());
    at::Tensor flat = buckets_[bucket].flat();
    if (!sent_[bucket].is_same(flat)) flat.copy_(sent_[bucket]);
  }
}

}  // namespace lockstep::parallel::ddp
