#include <ATen/ops/from_blob.h>

#include <cstring>

#include "lockstep/comm/nccl/testing/fake_state.h"
#include "lockstep/comm/reduce.h"

namespace lockstep::comm::nccl::testing {
namespace {

void Copy(char* to, const char* from, size_t bytes) {
  if (to != from && bytes != 0) std::memmove(to, from, bytes);
}

// Rank by rank, so that results are the same each time.
void ReduceBlock(const std::vector<Collective>& ranks, size_t offset, size_t bytes, char* output) {
  const Collective& first = ranks[0];
  std::vector<std::vector<char>> scaled;
  std::vector<const void*> inputs;
  for (const Collective& rank : ranks) {
    const char* input = rank.input + offset;
    if (first.factor != 1) {
      scaled.emplace_back(input, input + bytes);
      at::from_blob(scaled.back().data(), {static_cast<int64_t>(first.count)},
                    at::TensorOptions(first.dtype))
          .mul_(first.factor);
      input = scaled.back().data();
    }
    inputs.push_back(input);
  }
  std::vector<char> result(bytes);  // the output may be an input of a later rank's block
  Reduce(result.data(), inputs, static_cast<int64_t>(first.count), first.dtype, first.op);
  Copy(output, result.data(), bytes);
}

}  // namespace

void Execute(const std::vector<Collective>& ranks) {
  const Collective& first = ranks[0];
  const size_t bytes = first.count * c10::elementSize(first.dtype);
  switch (first.kind) {
    case CollectiveKind::kAllReduce: {
      std::vector<char> result(bytes);
      ReduceBlock(ranks, /*offset=*/0, bytes, result.data());
      for (const Collective& rank : ranks) Copy(rank.output, result.data(), bytes);
      break;
    }
    case CollectiveKind::kReduceScatter:
      for (size_t to = 0; to < ranks.size(); ++to) {
        ReduceBlock(ranks, to * bytes, bytes, ranks[to].output);
      }
      break;
    case CollectiveKind::kAllGather:
      for (const Collective& to : ranks) {
        for (size_t from = 0; from < ranks.size(); ++from) {
          Copy(to.output + from * bytes, ranks[from].input, bytes);
        }
      }
      break;
    case CollectiveKind::kBroadcast:
      for (const Collective& to : ranks) Copy(to.output, ranks[first.root].input, bytes);
      break;
  }
}

}  // namespace lockstep::comm::nccl::testing
