#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::parallel {

// Modules with hooks, which LibTorch's C++ modules lack.
//
// A Unit is a module holder whose module runs hooks around forward. It is also what strategies work
// on: FSDP shards, gathers and frees the parameters of one Unit at a time, so the blocks of a model
// that repeat, and the model itself, are Units:
//
//   class BlockImpl : public torch::nn::Module {
//    public:
//     explicit BlockImpl(int64_t dim) {
//       linear = register_module("linear", torch::nn::Linear(dim, dim));
//     }
//     at::Tensor forward(at::Tensor x) { return x + linear(x); }
//     torch::nn::Linear linear = nullptr;
//   };
//   using Block = parallel::Unit<BlockImpl>;  // in the place of TORCH_MODULE(Block)
//   using Linear = parallel::Unit<torch::nn::LinearImpl>;
//
//   Block block(64);
//   HookHandle handle = block->AddPreForwardHook(
//       [](const std::vector<at::Tensor*>& inputs) { std::cout << inputs[0]->sizes(); });
//   block(x);  // runs it; so do block->forward(x) and Sequential
//
// Impl may be any module with one forward that returns something, not overloaded and no template;
// default arguments of it are lost. Names in state dicts are those of Impl. Only
// block->as<BlockImpl>()->forward(x) goes around the hooks. A Unit without hooks costs one
// comparison a call.
//
// Hooks see the tensors among the arguments and results: at::Tensor itself, and those in vectors,
// arrays, optionals, pairs and tuples. A struct of yours takes part when its namespace has
//
//   void ForEachTensor(MyOutput& output, const std::function<void(at::Tensor&)>& visit);
//
// Hooks belong to the module: copies of the holder share them, a copy of the module (clone(), which
// gives a Unit again) has none. They are called on the thread that calls forward; adding, removing
// and calling them is not synchronised.
class HookList;

// Removes its hook when destroyed. Move-only; may outlive the module.
class HookHandle {
 public:
  HookHandle() = default;
  HookHandle(HookHandle&& other) noexcept;
  HookHandle& operator=(HookHandle&& other) noexcept;
  ~HookHandle();

  void Remove();

  // Leaves the hook in place for as long as its module lives.
  void Keep() { list_.reset(); }

 private:
  friend class HookList;
  HookHandle(std::weak_ptr<HookList> list, int64_t id) : list_(std::move(list)), id_(id) {}

  std::weak_ptr<HookList> list_;
  int64_t id_ = 0;
};

// Gets the tensors of all arguments (pre-forward) or results (post-forward), and may replace them:
// `*tensors[0] = tensors[0]->to(at::kBFloat16)`. May throw, StatusError for instance.
using ForwardHook = std::function<void(const std::vector<at::Tensor*>& tensors)>;

class HookList : public std::enable_shared_from_this<HookList> {
 public:
  HookHandle Add(ForwardHook hook);
  void Remove(int64_t id);
  bool empty() const { return hooks_.empty(); }
  void Run(const std::vector<at::Tensor*>& tensors) const;
  void RunReversed(const std::vector<at::Tensor*>& tensors) const;

 private:
  std::list<std::pair<int64_t, ForwardHook>> hooks_;
  int64_t next_id_ = 1;
};

namespace internal {

template <typename T>
void CollectTensors(T& value, std::vector<at::Tensor*>& tensors);

template <typename T>
struct IsTuple : std::false_type {};
template <typename... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <typename A, typename B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

template <typename T>
struct IsSequence : std::false_type {};
template <typename T, typename A>
struct IsSequence<std::vector<T, A>> : std::true_type {};
template <typename T, size_t n>
struct IsSequence<std::array<T, n>> : std::true_type {};

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <typename T>
void CollectTensors(T& value, std::vector<at::Tensor*>& tensors) {
  if constexpr (std::is_const_v<T>) {
    // Hooks could not replace it.
  } else if constexpr (std::is_base_of_v<at::Tensor, T>) {
    if (value.defined()) tensors.push_back(&value);
  } else if constexpr (IsTuple<T>::value) {
    std::apply([&](auto&... each) { (CollectTensors(each, tensors), ...); }, value);
  } else if constexpr (IsOptional<T>::value) {
    if (value) CollectTensors(*value, tensors);
  } else if constexpr (IsSequence<T>::value) {
    if constexpr (!std::is_same_v<T, std::vector<bool>>) {
      for (auto& each : value) CollectTensors(each, tensors);
    }
  } else if constexpr (requires(const std::function<void(at::Tensor&)>& visit) {
                         ForEachTensor(value, visit);
                       }) {
    ForEachTensor(value, [&](at::Tensor& tensor) { CollectTensors(tensor, tensors); });
  }
}

}  // namespace internal

class UnitModule;

// Runs a Unit's forward in another way than by calling it once: see parallel/recompute.h.
class ForwardRunner {
 public:
  // Calls forward with `inputs` in the place of the tensors among its arguments, and returns the
  // tensors of its result. Without the hooks of this Unit, with those of the Units below it. May be
  // kept, and called again while the module lives; it keeps the other arguments, but no tensors.
  using Body = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

  virtual ~ForwardRunner() = default;

  // Called between the hooks, with the tensors among the arguments. Calls `body` once, and returns
  // what is to take the place of the tensors that it returned.
  virtual std::vector<at::Tensor> Run(UnitModule& unit, const std::vector<at::Tensor>& inputs,
                                      const Body& body) const = 0;
};

namespace internal {

// Whether a function can be called again when its caller's arguments are gone.
template <typename Result, typename... Args>
inline constexpr bool kIsRepeatable = std::is_object_v<Result> &&
                                      (std::is_copy_constructible_v<std::decay_t<Args>> && ...) &&
                                      ((!std::is_lvalue_reference_v<Args> ||
                                        std::is_const_v<std::remove_reference_t<Args>>)&&...);

// A call of `forward` that keeps its arguments, the tensors among them apart.
template <typename Result, typename... Args>
class RepeatableCall {
 public:
  RepeatableCall(std::function<Result(Args...)> forward, std::tuple<std::decay_t<Args>...>&& args)
      : forward_(std::move(forward)), args_(std::move(args)) {
    CollectTensors(args_, slots_);
  }
  RepeatableCall(const RepeatableCall&) = delete;

  std::vector<at::Tensor> TakeInputs() {
    std::vector<at::Tensor> inputs;
    for (at::Tensor* slot : slots_) inputs.push_back(std::exchange(*slot, at::Tensor()));
    return inputs;
  }

  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs, bool keep_result) {
    for (size_t i = 0; i < slots_.size(); ++i) *slots_[i] = inputs.at(i);
    auto args = args_;
    TakeInputs();
    Result result = std::apply(
        [&](auto&... each) -> Result { return forward_(static_cast<Args&&>(each)...); }, args);
    std::vector<at::Tensor*> tensors;
    CollectTensors(result, tensors);
    std::vector<at::Tensor> outputs;
    for (const at::Tensor* tensor : tensors) outputs.push_back(*tensor);
    if (keep_result) result_.emplace(std::move(result));
    return outputs;
  }

  // The kept result, with `outputs` for its tensors.
  Result TakeResult(std::vector<at::Tensor> outputs) {
    Result result = *std::move(result_);
    result_.reset();
    std::vector<at::Tensor*> tensors;
    CollectTensors(result, tensors);
    for (size_t i = 0; i < tensors.size(); ++i) *tensors[i] = std::move(outputs.at(i));
    return result;
  }

 private:
  const std::function<Result(Args...)> forward_;
  std::tuple<std::decay_t<Args>...> args_;
  std::vector<at::Tensor*> slots_;  // in args_
  std::optional<Result> result_;
};

[[noreturn]] void ThrowNotRepeatable(const torch::nn::Module& module);

// Tells the thread's UnitObserver, if it has one.
void AnnounceUnit(UnitModule& unit);

// Tells it of the model's Units, inner ones first.
void AnnounceUnits(torch::nn::Module& model);

}  // namespace internal

// What a strategy sees of a Unit's module, whatever its Impl. Found among a model's modules by
// dynamic_cast, see FindUnits.
class UnitModule {
 public:
  UnitModule() = default;
  UnitModule(const UnitModule&) : UnitModule() {}  // hooks and runner are not copied
  UnitModule& operator=(const UnitModule&) = delete;
  virtual ~UnitModule() = default;

  // Runs before forward, in the order in which hooks were added.
  HookHandle AddPreForwardHook(ForwardHook hook) { return pre_forward_->Add(std::move(hook)); }

  // Runs after forward, in the reverse of that order.
  HookHandle AddPostForwardHook(ForwardHook hook) { return post_forward_->Add(std::move(hook)); }

  // From now on `runner` runs forward, inside the hooks; null, as at first: it is just called.
  // forward then throws c10::Error where it could not be called again: arguments that cannot be
  // copied or are references to what is not const, or a result that is a reference.
  void SetForwardRunner(std::shared_ptr<const ForwardRunner> runner) {
    runner_ = std::move(runner);
  }

  virtual torch::nn::Module& module() = 0;

 protected:
  // Calls forward(args...) between the hooks.
  template <typename Result, typename... Args, typename Forward>
  Result CallWithHooks(Forward forward, Args&&... args) {
    if (pre_forward_->empty() && post_forward_->empty() && runner_ == nullptr) {
      return forward(std::forward<Args>(args)...);
    }
    // Arguments that are not the caller's own variables are copied, for hooks to replace.
    std::tuple<std::conditional_t<std::is_lvalue_reference_v<Args> &&
                                      !std::is_const_v<std::remove_reference_t<Args>>,
                                  Args, std::decay_t<Args>>...>
    held(std::forward<Args>(args)...);
    std::vector<at::Tensor*> tensors;
    if (!pre_forward_->empty()) {
      internal::CollectTensors(held, tensors);
      pre_forward_->Run(tensors);
    }
    Result result = CallForward<Result, Args...>(forward, held);
    if (!post_forward_->empty()) {
      tensors.clear();
      internal::CollectTensors(result, tensors);
      post_forward_->RunReversed(tensors);
    }
    return result;
  }

 private:
  template <typename Result, typename... Args, typename Forward, typename Held>
  Result CallForward(Forward& forward, Held& held) {
    if (runner_ == nullptr) {
      return std::apply(
          [&](auto&... each) -> Result { return forward(static_cast<Args&&>(each)...); }, held);
    }
    if constexpr (internal::kIsRepeatable<Result, Args...>) {
      const auto call =
          std::make_shared<internal::RepeatableCall<Result, Args...>>(forward, std::move(held));
      const std::vector<at::Tensor> inputs = call->TakeInputs();
      const auto first = std::make_shared<bool>(true);
      std::vector<at::Tensor> outputs =
          runner_->Run(*this, inputs, [call, first](const std::vector<at::Tensor>& tensors) {
            return (*call)(tensors, /*keep_result=*/std::exchange(*first, false));
          });
      return call->TakeResult(std::move(outputs));
    } else {
      internal::ThrowNotRepeatable(module());
    }
  }

  const std::shared_ptr<HookList> pre_forward_ = std::make_shared<HookList>();
  const std::shared_ptr<HookList> post_forward_ = std::make_shared<HookList>();
  std::shared_ptr<const ForwardRunner> runner_;
};

// Told of each Unit as soon as it is constructed, so that FSDP can shard a model while it is built
// and never hold it in full.
class UnitObserver {
 public:
  virtual ~UnitObserver() = default;

  // `unit` is complete: its parameters are there, and the Units below it were announced before it.
  // No shared_ptr holds it yet, so FindUnits(), parameters(), buffers() and children() work on it,
  // but modules() and apply() of LibTorch do not. What this throws, the constructor throws. A Unit
  // that was announced may be destroyed before the model is complete, when a constructor replaces
  // or drops it, and another one appear at its address.
  virtual void Built(UnitModule& unit) = 0;
};

// Tells `observer` of the Units that this thread constructs while the scope lives, copies and
// clones too (a clone when it has its values). Scopes nest, and the innermost counts: none is told
// where its observer is null.
class UnitObserverScope {
 public:
  explicit UnitObserverScope(UnitObserver* observer);
  ~UnitObserverScope();
  UnitObserverScope(const UnitObserverScope&) = delete;
  UnitObserverScope& operator=(const UnitObserverScope&) = delete;

 private:
  UnitObserver* const outer_;
};

namespace internal {

// The type of a function that takes and returns what a member function does.
template <typename Member>
struct Signature;
template <typename Owner, typename Result, typename... Args>
struct Signature<Result (Owner::*)(Args...)> {
  using Type = Result(Args...);
};
template <typename Owner, typename Result, typename... Args>
struct Signature<Result (Owner::*)(Args...) const> {
  using Type = Result(Args...);
};

}  // namespace internal

// Impl with hooks around its forward, whose signature is taken over.
template <typename Impl,
          typename Forward = typename internal::Signature<decltype(&Impl::forward)>::Type>
class Hooked;

template <typename Impl, typename Result, typename... Args>
class Hooked<Impl, Result(Args...)> : public Impl, public UnitModule {
 public:
  using Impl::Impl;

  Hooked() = default;
  Hooked(const Hooked& other) requires std::is_copy_constructible_v<Impl>
      : Hooked(static_cast<const Impl&>(other), FromImpl()) {}

  Result forward(Args... args) {
    return this->template CallWithHooks<Result, Args...>(
        [this](Args... inner) -> Result { return Impl::forward(std::forward<Args>(inner)...); },
        std::forward<Args>(args)...);
  }

  torch::nn::Module& module() override { return *this; }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    if constexpr (std::is_copy_constructible_v<Impl>) {
      std::shared_ptr<Hooked> copy;
      {
        UnitObserverScope silence(nullptr);  // what is cloned gets its values last
        // LibTorch's is an Impl, which has no hooks. It dies here, so its members can be shared.
        const std::shared_ptr<torch::nn::Module> plain = Impl::clone(device);
        copy.reset(new Hooked(dynamic_cast<const Impl&>(*plain), FromImpl()));
      }
      internal::AnnounceUnits(*copy);
      return copy;
    } else {
      return Impl::clone(device);
    }
  }

 private:
  struct FromImpl {};
  Hooked(const Impl& impl, FromImpl) : Impl(impl) {}

  struct Announcement {
    explicit Announcement(UnitModule& unit) { internal::AnnounceUnit(unit); }
  };
  [[no_unique_address]] Announcement announcement_{*this};  // last: all else is constructed
};

template <typename Impl>
class Unit : public torch::nn::ModuleHolder<Hooked<Impl>> {
 public:
  using torch::nn::ModuleHolder<Hooked<Impl>>::ModuleHolder;
};

// A Unit in a model: its name there ("" for the model itself, "blocks.0", ...) and its module.
struct NamedUnit {
  std::string name;
  UnitModule* unit = nullptr;
};

// All Units of a model, itself included, outer ones first, in the order in which they were
// registered; one that is registered in several places once, under its first name.
std::vector<NamedUnit> FindUnits(torch::nn::Module& model);

}  // namespace lockstep::parallel
