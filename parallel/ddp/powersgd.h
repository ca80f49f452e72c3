#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/parallel/ddp/comm_hook.h"

namespace lockstep::parallel::ddp {

struct PowerSgdOptions {
  int64_t rank = 1;            // of the approximation; 1
  int64_t start_step = 1000;   // backwards before it that are averaged in full; 1000
  double min_compression = 2;  // a gradient that shrinks less than so many times is sent in full; 2
  bool error_feedback = true;  // adds what was lost to the next step's gradient; true
  bool warm_start = true;      // continues from the last step's Q, else from a random one; true
  uint64_t seed = 0;           // of the random Q, the same on all ranks; 0
};

// PowerSGD: sends gradients as products of two thin matrices. Vogels, Karimireddy and Jaggi,
// "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
// algorithms 1 and 2:
//
//   parallel::Ddp ddp(model, comm, {.comm_hook = std::make_shared<PowerSgd>(
//                                       PowerSgdOptions{.rank = 2, .start_step = 100})});
//
// A gradient of shape (n, ...) is a matrix M of n rows (of its longest-stride dimension) and m
// columns. One step of power iteration approximates the average of the ranks' M by P Q^T, P of
// shape (n, rank) with orthonormal columns, Q of (m, rank): (n + m) * rank elements are sent in the
// place of n * m. Vectors, small matrices and dtypes other than f32 and f64 are sent in full. The
// gradients are approximate but equal on all ranks; a mean of rank at most `rank` is exact.
//
// A bucket costs two all-reduces: of P and what is sent in full, started during backward, and of Q,
// after it. Error feedback keeps one more tensor of the gradients' size.
class PowerSgd : public CommHook {
 public:
  // StatusError unless rank and min_compression are positive and start_step is not negative.
  explicit PowerSgd(PowerSgdOptions options = {});

  std::string name() const override;
  void SetBuckets(absl::Span<const Bucket> buckets, comm::Communicator& comm) override;
  void Start(size_t bucket) override;
  void Finish() override;

 private:
  // A gradient that is compressed.
  struct Matrix {
    size_t parameter = 0;
    at::Tensor m;  // the bucket's memory, (n, m)
    at::Tensor p;  // of Packed::first, (n, rank)
    at::Tensor q;  // of Packed::second, (m, rank)
  };
  // What a bucket sends.
  struct Packed {
    std::vector<Matrix> matrices;
    std::vector<std::pair<at::Tensor, at::Tensor>> full;  // (the bucket's, its place in `first`)
    at::Tensor first;                                     // all P, and what is sent in full
    at::Tensor second;                                    // all Q
    comm::Work work;
  };
  // Lives on when buckets change.
  struct State {
    at::Tensor error;
    at::Tensor q;
  };

  Packed Pack(const Bucket& bucket, comm::Communicator& comm) const;
  void FillRandom(const at::Tensor& tensor);
  void PrepareQ(Matrix& matrix);

  const PowerSgdOptions options_;
  at::Generator generator_;
  absl::Span<const Bucket> buckets_;
  comm::Communicator* comm_ = nullptr;
  std::vector<Packed> packed_;                // by bucket
  std::unordered_map<size_t, State> states_;  // by parameter
  int64_t step_ = 0;
};

}  // namespace lockstep::parallel::ddp
