#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace lockstep::parallel {

// What ranks share out between steps. Ψ parameters in f32 and AdamW on N ranks: bytes a rank
// between steps, padding apart (Rajbhandari et al., "ZeRO", 2020, section 5, for f32).
enum class Sharding {
  kFull,       // parameters, gradients, optimizer state: 16 Ψ / N; ZeRO-3, FULL_SHARD
  kGradOp,     // gradients and optimizer state: 4 Ψ + 12 Ψ / N; ZeRO-2, SHARD_GRAD_OP
  kOptimizer,  // optimizer state alone: 8 Ψ + 8 Ψ / N; ZeRO-1
};

// What NoSync() leaves for the backward after it.
enum class NoSyncGradients {
  kUnsharded,  // whole gradients of this rank: no communication, but their memory
  kReduced,    // each backward reduce-scatters and adds up shards: no memory, but communication
};

// As torch.distributed.fsdp.MixedPrecisionPolicy. Parameters keep their own dtype as shards, which
// the optimizer updates; forward and backward see copies in `param`.
struct MixedPrecision {
  std::optional<at::ScalarType> param;   // of forward and backward; none: the parameters' own
  std::optional<at::ScalarType> reduce;  // in which gradients are reduced; none: that of `param`.
                                         // Ranks' f16 and bf16 are added up in f32.
  std::optional<at::ScalarType> output;  // floating-point outputs of the model are cast to it; none
  bool cast_inputs = true;  // floating-point inputs of every Unit are cast to `param`; true
};

struct FsdpOptions {
  bool sync_module_states = true;  // start from rank 0's parameters and buffers on all ranks; true

  Sharding sharding = Sharding::kFull;

  // Free a Unit's parameters after its forward and gather them again for its backward; true. With
  // false they stay, which costs their memory and saves an all-gather. The model's own parameters,
  // which backward needs first, always stay.
  bool reshard_after_forward = true;

  // Ranks over which parameters are sharded between a Unit's forward and its backward, a divisor of
  // shard_size: those of a node, say, so that backward gathers inside it. 0: as between steps.
  int reshard_size = 0;

  // Hybrid sharding: this many neighbouring ranks share a model out, and groups of them are
  // replicas that average their gradients; the ranks of a node, say. Divides the number of ranks,
  // which 0 stands for.
  int shard_size = 0;

  MixedPrecision mixed_precision;

  // Keep shards, their gradients and so the optimizer's state in the memory of the host,
  // page-locked where the communicator's device is a GPU; false.
  bool cpu_offload = false;

  // Gather the next Unit while one computes, in the order of the last step; true.
  bool prefetch = true;

  NoSyncGradients no_sync = NoSyncGradients::kUnsharded;

  // Fill buffers of parameters with NaN when they are freed, so that a pointer to one that somebody
  // has kept shows; false.
  bool debug = false;
};

}  // namespace lockstep::parallel
