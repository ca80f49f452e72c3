#include "lockstep/parallel/fsdp/fsdp.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <deque>
#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"
#include "lockstep/parallel/step_timer.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {

// What happens in forward and backward. Hooks run on the thread that runs them.
class Fsdp::State : public fsdp::UnitEvents {
 public:
  State(torch::nn::Module& model, comm::Communicator& comm,
        std::function<void(const StepStatistics&)> report)
      : comm_(comm),
        report_(std::move(report)),
        unsharded_pool_(comm, trace::MemoryCategory::kUnsharded),
        gradient_pool_(comm, trace::MemoryCategory::kGradients) {
    std::vector<NamedUnit> units = FindUnits(model);
    const auto owned = ValueOrThrow(fsdp::AssignParameters(model, units));
    for (size_t i = 0; i < units.size(); ++i) {
      units_.push_back(std::make_unique<fsdp::ShardedUnit>(units[i], owned[i], i, comm_, *this));
    }
  }

  const std::vector<std::unique_ptr<fsdp::ShardedUnit>>& units() const { return units_; }

  void Unshard(fsdp::ShardedUnit& unit) {
    unit.Unshard(
        unsharded_pool_,
        [this](comm::Work work, int64_t bytes) { return timer_.Track(std::move(work), bytes); },
        [this](const comm::Work& work) { ThrowIfError(timer_.Wait(work)); });
  }
  void Reshard(fsdp::ShardedUnit& unit) { unit.Reshard(unsharded_pool_); }
  void FreeBuffers() {
    unsharded_pool_.Clear();
    gradient_pool_.Clear();
  }

  void PreForward(size_t index) override;
  void PostForward(size_t index, const std::vector<at::Tensor*>& outputs) override;
  void Accumulated(size_t index, size_t group, size_t parameter) override;

 private:
  // What a hook that outlives the strategy does.
  static void ThrowGone();

  void PreBackward(size_t index);
  void PostBackward(fsdp::ShardedUnit& unit);
  void EnterBackward(fsdp::ShardedUnit& unit);
  void FinishBackward();
  void FinishOldestReduce();

  // Runs `body`; aborts the communicator where it throws, so that no rank waits for this one.
  template <typename Body>
  void Guarded(const std::string& where, Body body);

  struct Reduce {
    fsdp::FlatGroup* group = nullptr;
    comm::Work work;
  };

  comm::Communicator& comm_;
  const std::function<void(const StepStatistics&)> report_;
  fsdp::BufferPool unsharded_pool_;
  fsdp::BufferPool gradient_pool_;
  std::vector<std::unique_ptr<fsdp::ShardedUnit>> units_;  // the model first
  std::deque<Reduce> reduces_;                             // under way, oldest first
  bool in_backward_ = false;
  StepTimer timer_;
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>();  // hooks hold it weakly
};

void Fsdp::State::PreForward(size_t index) {
  const bool is_model = index == 0;
  if (is_model && in_backward_) {
    Guarded("", [] {
      throw StatusError(absl::FailedPreconditionError(
          "forward: the backward before it ended with an exception, so the ranks' gradients are "
          "incomplete: start again from the last good state with a new strategy"));
    });
  }
  // A forward that no backward followed has left the model's own parameters as they were then.
  if (is_model) Reshard(*units_[index]);
  Unshard(*units_[index]);
}

void Fsdp::State::PostForward(size_t index, const std::vector<at::Tensor*>& outputs) {
  bool backward_follows = false;
  if (at::GradMode::is_enabled()) {
    if (outputs.empty()) {
      Guarded(units_[index]->name(), [] {
        throw StatusError(absl::FailedPreconditionError(
            "its forward returns no tensor that hooks can see, so backward would find its "
            "parameters freed: see ForEachTensor in parallel/unit.h"));
      });
    }
    for (at::Tensor* output : outputs) {
      if (!output->requires_grad()) continue;
      backward_follows = true;
      output->register_hook([this, index, alive = std::weak_ptr<bool>(alive_)](const at::Tensor&) {
        if (alive.expired()) ThrowGone();
        PreBackward(index);
      });
    }
  }
  const bool is_model = index == 0;
  if (!is_model || !backward_follows) Reshard(*units_[index]);
}

void Fsdp::State::ThrowGone() {
  throw StatusError(absl::FailedPreconditionError(
      "backward: the Fsdp strategy that the forward ran under has been destroyed"));
}

template <typename Body>
void Fsdp::State::Guarded(const std::string& where, Body body) {
  at::NoGradGuard no_grad;
  try {
    body();
  } catch (const StatusError& error) {
    const absl::Status status(
        error.status().code(),
        absl::StrCat(where.empty() ? "" : absl::StrCat("Unit \"", where, "\": "),
                     std::string{error.status().message()}));
    comm_.Abort(status);
    throw StatusError(status);
  } catch (const std::exception& error) {
    const absl::Status status =
        absl::InternalError(absl::StrCat("in backward of Unit \"", where, "\": ", error.what()));
    comm_.Abort(status);
    throw StatusError(status);
  }
}

void Fsdp::State::PreBackward(size_t index) {
  fsdp::ShardedUnit& unit = *units_[index];
  Guarded(unit.name(), [&] {
    EnterBackward(unit);
    Unshard(unit);
  });
}

void Fsdp::State::Accumulated(size_t index, size_t group, size_t parameter) {
  fsdp::ShardedUnit& unit = *units_[index];
  Guarded(unit.name(), [&] {
    EnterBackward(unit);
    fsdp::FlatGroup& flat = unit.groups()[group];
    if (flat.has_gradient(parameter)) {
      throw StatusError(GradientTwiceError(flat.parameter(parameter).name));
    }
    // One Unit's gradients are being reduced while the next one's arrive, no more.
    while (!unit.has_gradients() && reduces_.size() > 1) FinishOldestReduce();
    flat.StoreGradient(parameter, gradient_pool_);
    if (--unit.pending == 0) PostBackward(unit);
  });
}

void Fsdp::State::PostBackward(fsdp::ShardedUnit& unit) {
  for (fsdp::FlatGroup& group : unit.groups()) {
    if (group.has_gradients()) {
      reduces_.push_back({&group, timer_.Track(group.StartReduce(), group.full_bytes())});
    }
  }
  // Backward may still need a frozen parameter when the trainable ones have their gradients.
  if (!unit.has_frozen()) Reshard(unit);
}

void Fsdp::State::FinishOldestReduce() {
  ThrowIfError(timer_.Wait(reduces_.front().work));
  reduces_.front().group->FinishReduce(gradient_pool_);
  reduces_.pop_front();
}

// A hook of the unit fired: the first in this backward, or a later one.
void Fsdp::State::EnterBackward(fsdp::ShardedUnit& unit) {
  if (!std::exchange(unit.in_backward, true)) unit.pending = unit.num_trainable();
  if (std::exchange(in_backward_, true)) return;
  timer_.BeginBackward();
  AtEndOfBackward([this] { Guarded("", [this] { FinishBackward(); }); },
                  [this, alive = std::weak_ptr<bool>(alive_)] {
                    if (!alive.expired()) comm_.Abort(AbandonedBackwardError());
                  });
}

void Fsdp::State::FinishBackward() {
  in_backward_ = false;
  for (const auto& unit : units_) {
    unit->in_backward = false;
    // Some of its parameters were not used: the others' gradients have waited for them.
    if (unit->pending > 0 && unit->has_gradients()) PostBackward(*unit);
    unit->pending = 0;
  }
  while (!reduces_.empty()) FinishOldestReduce();
  for (const auto& unit : units_) Reshard(*unit);
  FreeBuffers();
  report_(timer_.End());
}

Fsdp::Fsdp(std::shared_ptr<torch::nn::Module> model, comm::Communicator& comm, FsdpOptions options)
    : Strategy(std::move(model)), comm_(SplitPrivate(comm)) {
  CheckSameModel(this->model(), *comm_);
  if (options.sync_module_states) BroadcastModel(this->model(), *comm_);
  state_ = std::make_unique<State>(this->model(), *comm_,
                                   [this](const StepStatistics& step) { set_last_step(step); });
  std::unordered_map<std::string, at::Tensor> slices;
  for (const auto& unit : state_->units()) {
    for (const fsdp::FlatGroup& group : unit->groups()) {
      for (size_t i = 0; i < group.size(); ++i) slices[group.parameter(i).name] = group.slice(i);
    }
  }
  std::vector<NamedTensor> parameters = named_parameters();
  for (NamedTensor& parameter : parameters) parameter.tensor = slices.at(parameter.name);
  set_parameters(std::move(parameters));
}

Fsdp::~Fsdp() {
  if (state_ == nullptr) return;
  FindUnits(model())[0]
      .unit
      ->AddPreForwardHook([](const std::vector<at::Tensor*>&) {
        throw StatusError(
            absl::FailedPreconditionError("forward: the Fsdp that has sharded this model has been "
                                          "destroyed, and the weights with "
                                          "it"));
      })
      .Keep();
}

double Fsdp::SumOverShards(double value) {
  at::Tensor sum = at::tensor(value, at::kDouble);
  ThrowIfError(comm_->AllReduce(sum, comm::ReduceOp::kSum).Wait());
  return sum.item<double>();
}

std::vector<StateShard> Fsdp::StateShards() {
  std::vector<StateShard> shards;
  for (const auto& unit : state_->units()) {
    for (const fsdp::FlatGroup& group : unit->groups()) {
      for (size_t i = 0; i < group.size(); ++i) {
        shards.push_back({.name = group.parameter(i).name,
                          .sizes = group.parameter(i).tensor.sizes().vec(),
                          .offset = group.slice_offset(i),
                          .local = group.slice(i).detach(),
                          .trainable = group.requires_grad()});
      }
    }
  }
  for (const auto& buffer : model().named_buffers()) {
    shards.push_back({.name = buffer.key(),
                      .sizes = buffer.value().sizes().vec(),
                      .local = buffer.value().detach().view(-1),
                      .replica = comm_->rank(),
                      .replicas = comm_->size()});
  }
  return shards;
}

void Fsdp::UpdateState(const StateUpdater& update) {
  at::NoGradGuard no_grad;
  for (const auto& unit : state_->units()) {
    state_->Unshard(*unit);
    for (fsdp::FlatGroup& group : unit->groups()) {
      for (size_t i = 0; i < group.size(); ++i) {
        update(group.parameter(i).name, group.parameter(i).tensor.detach());
      }
      group.StoreShard();
    }
    state_->Reshard(*unit);
    state_->FreeBuffers();
  }
  for (const auto& buffer : model().named_buffers()) update(buffer.key(), buffer.value());
}

}  // namespace lockstep::parallel
