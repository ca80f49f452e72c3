#include "lockstep/parallel/fsdp/shard_context.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::fsdp {
namespace {

// `options` with the number of ranks in the place of shard_size 0.
FsdpOptions Checked(FsdpOptions options, int size) {
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
  return options;
}

}  // namespace

ShardContext::ShardContext(comm::Communicator& comm, FsdpOptions options)
    : options_(Checked(options, comm.size())),
      world_(SplitPrivate(comm)),
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
