#include "lockstep/parallel/fsdp/shard_context.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/comm/operation.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::fsdp {
namespace {

// What ranks must have alike of the options; the rest is each rank's affair.
std::vector<std::string> Describe(const FsdpOptions& options) {
  const auto dtype = [](const std::optional<at::ScalarType>& given) {
    return given ? c10::toString(*given) : "none";
  };
  const MixedPrecision& mixed = options.mixed_precision;
  return {absl::StrCat("sync_module_states=", options.sync_module_states),
          absl::StrCat("sharding=", static_cast<int>(options.sharding)),
          absl::StrCat("reshard_after_forward=", options.reshard_after_forward),
          absl::StrCat("reshard_size=", options.reshard_size),
          absl::StrCat("shard_size=", options.shard_size),
          absl::StrCat("mixed_precision.param=", dtype(mixed.param)),
          absl::StrCat("mixed_precision.reduce=", dtype(mixed.reduce)),
          absl::StrCat("prefetch=", options.prefetch),
          absl::StrCat("no_sync=", static_cast<int>(options.no_sync))};
}

// `options` with the number of ranks in the place of shard_size 0.
FsdpOptions Checked(FsdpOptions options, comm::Communicator& comm) {
  torch::nn::Module none;
  CheckSameModel(none, comm, {.options = Describe(options)});  // or some would wait for ever below
  const int size = comm.size();
  if (options.shard_size == 0) options.shard_size = size;
  const auto check_divides = [](const char* name, int value, const char* what, int whole) {
    if (value > 0 && whole % value == 0) return;
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(
        "FsdpOptions: ", name, " is ", value, ", which does not divide ", what, ", ", whole)));
  };
  check_divides("shard_size", options.shard_size, "the number of ranks", size);
  if (options.reshard_size != 0) {
    check_divides("reshard_size", options.reshard_size, "shard_size", options.shard_size);
    if (!options.reshard_after_forward || options.sharding != Sharding::kFull) {
      throw StatusError(absl::InvalidArgumentError(
          "FsdpOptions: reshard_size needs reshard_after_forward and Sharding::kFull: otherwise "
          "parameters stay whole after forward"));
    }
  }
  const MixedPrecision& mixed = options.mixed_precision;
  for (const auto& dtype : {mixed.param, mixed.reduce, mixed.output}) {
    if (!dtype || (at::isFloatingType(*dtype) && comm::IsSupported(*dtype))) continue;
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("FsdpOptions: mixed_precision has ", c10::toString(*dtype),
                     ": f16, bf16, f32 and f64 are possible")));
  }
  return options;
}

}  // namespace

ShardContext::ShardContext(comm::Communicator& comm, FsdpOptions options)
    : world_(SplitPrivate(comm)),
      options_(Checked(options, *world_)),
      timer_(world_->device()),
      unsharded_pool_(*world_, trace::MemoryCategory::kUnsharded, options.debug),
      gradient_pool_(*world_, trace::MemoryCategory::kGradients, options.debug) {
  const int rank = comm.rank();
  TimedCommunicator timed(SplitPrivate(*world_), timer_);
  const int shard_size = options_.shard_size;
  mesh_ = ValueOrThrow(
      comm::Mesh::Create(timed, {{"replicate", comm.size() / shard_size}, {"shard", shard_size}}));
  shard_untimed_ = ValueOrThrow(world_->Split(rank / shard_size, rank));
  if (options_.reshard_size != 0 && options_.reshard_size < shard_size) {
    reshard_ = ValueOrThrow(timed.Split(rank / options_.reshard_size, rank));
  }
  timer_.End();  // what this took is no step's
}

comm::Communicator* ShardContext::replicas() {
  return mesh_->size("replicate") == 1 ? nullptr : &mesh_->dimension("replicate");
}

void ShardContext::ClearPools() {
  unsharded_pool_.Clear();
  gradient_pool_.Clear();
}

}  // namespace lockstep::parallel::fsdp
