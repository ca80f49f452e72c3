#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/parallel/ddp/bucket.h"

namespace lockstep::parallel::ddp {

// How Ddp averages a bucket: by an all-reduce unless DdpOptions::comm_hook says otherwise, as
// HalfHook (16 bits on the wire) and PowerSgd (low rank) do. A hook of your own:
//
//   class SignHook : public CommHook {           // signs only
//    public:
//     std::string name() const override { return "sign"; }
//     void SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) override {
//       buckets_ = buckets;
//       comm_ = &comm;
//       works_.assign(buckets.size(), comm::Work());
//     }
//     void Start(size_t bucket) override {
//       at::Tensor flat = buckets_[bucket].flat();
//       flat.sign_();
//       works_[bucket] = comm_->AllReduce(flat, comm::ReduceOp::kAverage);
//     }
//     void Finish() override {
//       for (const comm::Work& work : works_) ThrowIfError(work.Wait());
//     }
//     ...
//   };
//   parallel::Ddp ddp(model, comm, {.comm_hook = std::make_shared<SignHook>()});
//
// A bucket arrives with this rank's gradients; Finish() must leave the average over all ranks in
// it. All ranks get the same calls in
// the same order, so that what they issue matches. Calls come from the thread that runs backward,
// with gradients disabled; errors are thrown, as StatusError. A hook serves one Ddp.
class CommHook {
 public:
  virtual ~CommHook() = default;
  CommHook(const CommHook&) = delete;
  CommHook& operator=(const CommHook&) = delete;

  // With its settings: ranks whose hooks differ in it are refused.
  virtual std::string name() const = 0;

  // The buckets from now on; both outlive the hook's use of them. Called when Ddp is made, and once
  // more at the second backward, when buckets have been put into the order of the first.
  virtual void SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) = 0;

  // Bucket number `bucket` is full. Called during backward for every bucket in turn; what waits
  // here, waits while it could compute.
  virtual void Start(size_t bucket) = 0;

  // Backward is over, and all buckets have been started: waits for them.
  virtual void Finish() = 0;

 protected:
  CommHook() = default;
};

// What Ddp does without a hook: one all-reduce a bucket.
class AllReduceHook : public CommHook {
 public:
  std::string name() const override { return "all-reduce"; }
  void SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) override;
  void Start(size_t bucket) override;
  void Finish() override;

 private:
  absl::Span<const Bucket> buckets_;
  comm::Communicator* comm_ = nullptr;
  std::vector<comm::Work> works_;
};

}  // namespace lockstep::parallel::ddp
