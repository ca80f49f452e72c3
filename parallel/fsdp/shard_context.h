#pragma once

#include <memory>
#include <optional>

#include "lockstep/comm/communicator.h"
#include "lockstep/comm/mesh.h"
#include "lockstep/parallel/fsdp/buffer_pool.h"
#include "lockstep/parallel/fsdp/fsdp_options.h"
#include "lockstep/parallel/step_timer.h"

namespace lockstep::parallel::fsdp {

// What all Units of a sharded model share: how it is sharded, over whom, and buffers.
class ShardContext {
 public:
  // Collective. StatusError with InvalidArgument for options that do not go together.
  ShardContext(comm::Communicator& comm, FsdpOptions options);

  const FsdpOptions& options() const { return options_; }
  StepTimer& timer() { return timer_; }

  // All ranks; not timed.
  comm::Communicator& world() { return *world_; }

  // The ranks that together hold one model; `untimed` is another handle to the same.
  comm::Communicator& shard() { return mesh_->dimension("shard"); }
  comm::Communicator& shard_untimed() { return *shard_untimed_; }

  // The ranks that hold the same shards; null where no others do.
  comm::Communicator* replicas();

  // The ranks among which parameters are shared out after forward; null where that is shard().
  comm::Communicator* reshard() { return reshard_.get(); }

  BufferPool& unsharded_pool() { return unsharded_pool_; }
  BufferPool& gradient_pool() { return gradient_pool_; }

  // Frees the buffers that nobody uses.
  void ClearPools();

 private:
  const std::unique_ptr<comm::Communicator> world_;
  const FsdpOptions options_;
  StepTimer timer_;
  std::optional<comm::Mesh> mesh_;
  std::unique_ptr<comm::Communicator> shard_untimed_;
  std::unique_ptr<comm::Communicator> reshard_;
  BufferPool unsharded_pool_;
  BufferPool gradient_pool_;
};

}  // namespace lockstep::parallel::fsdp
