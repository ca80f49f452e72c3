#include "lockstep/tools/bench/collective_measure.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "lockstep/tools/bench/bare_mpi.h"

namespace lockstep::bench {
namespace {

using comm::OperationKind;
using comm::ReduceOp;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Time(const std::function<void()>& body) {
  const double start = Now();
  body();
  return Now() - start;
}

// Each of `values` becomes the largest of all ranks.
absl::Status TakeSlowest(comm::Communicator& comm, std::vector<double>& values) {
  const auto count = static_cast<int64_t>(values.size());
  return comm.AllReduce(at::from_blob(values.data(), {count}, at::kDouble), ReduceOp::kMax).Wait();
}

struct Buffers {
  at::Tensor whole;
  at::Tensor part;
};

absl::Status Call(comm::Communicator& comm, OperationKind kind, const Buffers& buffers) {
  if (kind == OperationKind::kAllReduce) {
    return comm.AllReduce(buffers.whole, ReduceOp::kSum).Wait();
  }
  if (kind == OperationKind::kAllGather) {
    return comm.AllGatherInto(buffers.whole, buffers.part).Wait();
  }
  return comm.ReduceScatterInto(buffers.part, buffers.whole, ReduceOp::kSum).Wait();
}

// Some products of matrices that stay in the cache.
void Compute(int rounds) {
  static const at::Tensor a = at::ones({192, 192});
  static at::Tensor out = at::empty({192, 192});
  for (int i = 0; i < rounds; ++i) at::mm_out(out, a, a);
}

int RoundsFor(double seconds) {
  Compute(50);
  const double each = Time([] { Compute(50); }) / 50;
  return std::max(1, static_cast<int>(seconds / each));
}

}  // namespace

absl::Status MeasureRound(comm::Communicator& comm, const std::vector<int64_t>& sizes, int samples,
                          Times& times) {
  for (int64_t bytes : sizes) {
    const int ranks = comm.size();
    const int64_t count = bytes / 4 / ranks * ranks;
    const Buffers shared = {comm.Empty({count}, at::kFloat).zero_(),
                            comm.Empty({count / ranks}, at::kFloat).zero_()};
    const Buffers own = {at::zeros({count}), at::zeros({count / ranks})};
    const int calls = bytes <= kBatchedBytes ? kBatch : 1;
    absl::Status status;
    const auto run = [&](const std::string& contender, OperationKind kind) {
      if (contender == "mpi") {
        BareMpi(kind, own.whole.data_ptr<float>(), own.part.data_ptr<float>(), count, ranks);
      } else if (contender == "memcpy") {
        std::memcpy(own.whole.data_ptr(), shared.whole.data_ptr(), own.whole.nbytes());
      } else if (status.ok()) {
        status = Call(comm, kind, contender == "lockstep" ? shared : own);
      }
    };
    for (OperationKind kind : kKinds) {
      for (const char* contender : kContenders) {
        std::vector<double> found;
        for (int sample = -2; sample < samples; ++sample) {
          if (absl::Status s = comm.Barrier().Wait(); !s.ok()) return s;
          const double seconds = Time([&] {
            for (int call = 0; call < calls; ++call) run(contender, kind);
          });
          if (sample >= 0) found.push_back(seconds / calls);
        }
        if (!status.ok()) return status;
        if (absl::Status s = TakeSlowest(comm, found); !s.ok()) return s;
        std::vector<double>& all = times[{contender, kind, bytes}];
        all.insert(all.end(), found.begin(), found.end());
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Overlap> MeasureOverlap(comm::Communicator& comm, const std::string& contender,
                                       int64_t bytes, double compute_seconds, int samples) {
  const int64_t count = bytes / 4;
  const at::Tensor tensor = comm.Empty({count}, at::kFloat).zero_();
  const int rounds = RoundsFor(compute_seconds);
  absl::Status status;
  const auto reduce = [&](int compute_rounds) {
    if (contender == "mpi") {
      BareMpiAllReduceBeside(tensor.data_ptr<float>(), count, [&] { Compute(compute_rounds); });
      return;
    }
    const comm::Work work = comm.AllReduce(tensor, ReduceOp::kSum);
    Compute(compute_rounds);
    if (absl::Status s = work.Wait(); !s.ok()) status = s;
  };
  Overlap found;
  for (int sample = -1; sample < samples; ++sample) {
    for (std::vector<double>* which : {&found.compute, &found.transfer, &found.both}) {
      if (absl::Status s = comm.Barrier().Wait(); !s.ok()) return s;
      const double seconds = Time([&] {
        if (which == &found.compute) {
          Compute(rounds);
        } else {
          reduce(which == &found.both ? rounds : 0);
        }
      });
      if (!status.ok()) return status;
      if (sample >= 0) which->push_back(seconds);
    }
  }
  for (std::vector<double>* which : {&found.compute, &found.transfer, &found.both}) {
    if (absl::Status s = TakeSlowest(comm, *which); !s.ok()) return s;
  }
  return found;
}

absl::StatusOr<Late> MeasureLate(comm::Communicator& comm, const std::string& contender,
                                 double compute_seconds, int samples) {
  const bool is_late = comm.rank() == comm.size() - 1;
  const int rounds = is_late ? RoundsFor(compute_seconds) : 0;
  const at::Tensor tensor = comm.Empty({1 << 20}, at::kFloat).zero_();
  Late late;
  for (int sample = -1; sample < samples; ++sample) {
    for (std::vector<double>* which : {&late.alone, &late.waited_for}) {
      if (absl::Status s = comm.Barrier().Wait(); !s.ok()) return s;
      const double seconds = Time([&] {
        if (is_late) Compute(rounds);
        if (!is_late && which == &late.alone) {
          std::this_thread::sleep_for(std::chrono::duration<double>(3 * compute_seconds));
        }
      });
      if (contender == "mpi") {
        BareMpi(OperationKind::kAllReduce, tensor.data_ptr<float>(), nullptr, tensor.numel(),
                comm.size());
      } else if (absl::Status s = comm.AllReduce(tensor, ReduceOp::kSum).Wait(); !s.ok()) {
        return s;
      }
      if (sample >= 0) which->push_back(is_late ? seconds : 0);
    }
  }
  for (std::vector<double>* which : {&late.alone, &late.waited_for}) {
    if (absl::Status s = TakeSlowest(comm, *which); !s.ok()) return s;
  }
  return late;
}

}  // namespace lockstep::bench
