#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/parallel/fsdp/gather_order.h"
#include "lockstep/parallel/fsdp/shard_context.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"
#include "lockstep/parallel/node_ptr.h"

namespace lockstep::parallel::fsdp {

// What happens to a model's Units in forward and backward: when they are gathered, freed, and their
// gradients reduced. Hooks run on the thread that runs forward or backward.
class ShardedModel : public UnitEvents {
 public:
  // `groups`: those of the Units, in the order of FindUnits(model). `sync`: whether a backward that
  // begins now reduces gradients. `report` gets what each backward that did took.
  ShardedModel(torch::nn::Module& model, std::vector<std::vector<FlatGroup>> groups,
               ShardContext& context, std::function<bool()> sync,
               std::function<void(StepReader)> report);

  const std::vector<std::unique_ptr<ShardedUnit>>& units() const { return units_; }

  // See Fsdp.
  void Unshard(const std::string& unit, bool wait);
  void Reshard(const std::string& unit);
  void ReshardAll();
  void DropGradients();

  // Calls UpdateFull() of all groups, with `find` for tensors by name.
  void UpdateFull(const std::function<at::Tensor(const std::string& name)>& find,
                  const Strategy::StateUpdater& update);

  void PreForward(size_t index, const std::vector<at::Tensor*>& inputs) override;
  void PostForward(size_t index, const std::vector<at::Tensor*>& outputs) override;
  void Accumulated(size_t index, size_t group, size_t parameter) override;

 private:
  // A forward of a Unit with frozen parameters. Backward needs them until the gradients of its
  // inputs are there.
  struct Use {
    int64_t backward = 0;  // the last one that came here
    int inputs = 0;        // that require gradients
    int open = 0;          // of these, in that backward, those whose gradients are still to come
    bool ends_elsewhere = false;  // backward goes on in Units inside when these are there
  };

  // Where a tensor's gradient goes: what produced it, and as which result; or itself.
  using Source = std::tuple<NodePtr, int64_t, const void*>;
  static Source SourceOf(const at::Tensor& tensor);

  // A forward that is running.
  struct Running {
    std::shared_ptr<Use> use;  // null: not needed
    std::vector<Source> inputs;
  };

  static void ThrowGone();

  void BeginForward();
  void PreBackward(size_t index, Use* use);
  void InputDone(size_t index, Use& use);
  void PostBackward(ShardedUnit& unit);
  void ReshardAfterBackward(ShardedUnit& unit);
  void EnterBackward(ShardedUnit& unit);
  void FinishBackward();
  void FinishOldestReduce();

  // Has the Unit's parameters there, and the next one's on their way.
  void Need(size_t index);
  void DropPrefetched();
  void Free(ShardedUnit& unit, bool until_backward = false);
  ShardedUnit& Find(const std::string& unit);

  // Runs `body`; aborts the communicator where it throws, so that no rank waits for this one.
  template <typename Body>
  void Guarded(const ShardedUnit* unit, Body body);

  ShardContext& context_;
  const std::function<bool()> sync_now_;
  const std::function<void(StepReader)> report_;
  std::vector<std::unique_ptr<ShardedUnit>> units_;  // the model first
  GatherOrder forward_order_;
  GatherOrder backward_order_;
  std::optional<size_t> prefetched_;
  std::vector<Running> running_;    // outermost first
  std::deque<FlatGroup*> reduces_;  // under way, oldest first
  int64_t backwards_ = 0;
  bool in_backward_ = false;
  bool sync_ = true;         // the current backward reduces, and an optimizer's step follows
  bool up_to_date_ = false;  // what is gathered between backward and forward
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>();  // hooks hold it weakly
};

}  // namespace lockstep::parallel::fsdp
