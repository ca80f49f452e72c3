#include "lockstep/parallel/ddp/sync_batch_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <ostream>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel {
namespace {

// Lets an autograd node keep the communicator.
struct CommHolder : torch::CustomClassHolder {
  explicit CommHolder(std::shared_ptr<comm::Communicator> given) : comm(std::move(given)) {}
  std::shared_ptr<comm::Communicator> comm;
};

// All dimensions but that of channels.
std::vector<int64_t> ReducedDims(const at::Tensor& x) {
  std::vector<int64_t> dims = {0};
  for (int64_t dim = 2; dim < x.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// (C) -> (1, C, 1, ...), in the dtype that elements of x are computed in.
at::Tensor ToChannels(const at::Tensor& per_channel, const at::Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = -1;
  return per_channel.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).view(shape);
}

// f16 and bf16 are computed with in f32.
at::Tensor Widen(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

// Of all ranks' values together, in f64.
struct Statistics {
  at::Tensor count;  // (1), values a channel
  at::Tensor mean;   // (C)
  at::Tensor m2;     // (C), sum of squared deviations from it
};

Statistics GatherStatistics(const at::Tensor& x, comm::Communicator& comm) {
  const int64_t channels = x.size(1);
  const auto options = x.options().dtype(at::kDouble);
  const int64_t count = channels == 0 ? 0 : x.numel() / channels;
  at::Tensor own = at::zeros({2 * channels + 1}, options);
  if (count > 0) {
    const auto [variance, mean] = at::var_mean(Widen(x), ReducedDims(x), /*unbiased=*/false);
    own = at::cat({mean.to(at::kDouble), variance.to(at::kDouble) * static_cast<double>(count),
                   at::full({1}, static_cast<double>(count), options)});
  }
  at::Tensor all = at::empty({comm.size(), 2 * channels + 1}, options);
  ThrowIfError(comm.AllGatherInto(all, own).Wait());
  const at::Tensor means = all.narrow(1, 0, channels);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);
  Statistics statistics;
  statistics.count = counts.sum(0);
  statistics.mean = (means * counts).sum(0) / statistics.count;
  statistics.m2 =
      (all.narrow(1, channels, channels) + (means - statistics.mean).square() * counts).sum(0);
  return statistics;
}

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, const at::Tensor& bias,
                            const Statistics& statistics, double eps,
                            std::shared_ptr<comm::Communicator> comm) {
    const at::Tensor invstd = (statistics.m2 / statistics.count + eps).rsqrt();
    const at::Tensor scale = invstd * weight;
    const at::Tensor shift = bias - statistics.mean * scale;
    context->save_for_backward({x, weight, statistics.mean, invstd, statistics.count});
    context->saved_data["comm"] =
        c10::IValue::make_capsule(c10::make_intrusive<CommHolder>(std::move(comm)));
    return at::addcmul(ToChannels(shift, x), Widen(x), ToChannels(scale, x)).to(x.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3],
                     &count = saved[4];
    const auto holder =
        c10::static_intrusive_pointer_cast<CommHolder>(context->saved_data["comm"].toCapsule());
    at::NoGradGuard no_grad;

    const at::Tensor dy = Widen(gradients[0]);
    const at::Tensor centered = Widen(x) - ToChannels(mean, x);
    const std::vector<int64_t> dims = ReducedDims(x);
    const at::Tensor sum_dy = dy.sum(dims).to(at::kDouble);
    const at::Tensor sum_dy_centered = (dy * centered).sum(dims).to(at::kDouble);
    at::Tensor dx;
    if (context->needs_input_grad(0)) {
      at::Tensor sums = at::cat({sum_dy, sum_dy_centered});
      ThrowIfError(holder->comm->AllReduce(sums, comm::ReduceOp::kSum).Wait());
      const int64_t channels = x.size(1);
      const at::Tensor scale = invstd * weight;
      const at::Tensor offset = -scale * sums.narrow(0, 0, channels) / count;
      const at::Tensor slope =
          -scale * invstd.square() * sums.narrow(0, channels, channels) / count;
      dx = at::addcmul(ToChannels(offset, x), dy, ToChannels(scale, x))
               .addcmul_(centered, ToChannels(slope, x))
               .to(x.scalar_type());
    }
    const at::ScalarType dtype = weight.scalar_type();
    return {dx,
            (sum_dy_centered * invstd).to(dtype),
            sum_dy.to(dtype),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                                     std::shared_ptr<comm::Communicator> comm)
    : NormImplBase(options), comm_(std::move(comm)) {
  TORCH_CHECK(comm_ != nullptr, "SyncBatchNorm needs a communicator");
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 2 && input.size(1) == options.num_features(), "SyncBatchNorm of ",
              options.num_features(), " features takes (N, C, ...) with as many channels, and got ",
              input.sizes());
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  if (!is_training()) {
    return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                     /*training=*/!options.track_running_stats(),
                                                     /*momentum=*/0, options.eps());
  }
  Statistics statistics;
  {
    at::NoGradGuard no_grad;
    statistics = GatherStatistics(input, *comm_);
    // Asks a GPU, and waits for it, only where this rank's own values do not answer.
    if (input.numel() < 2 * options.num_features()) {
      const double count = statistics.count.item<double>();
      TORCH_CHECK(count > 1,
                  "SyncBatchNorm needs more than one value a channel in training, and all ranks "
                  "together have ",
                  count);
    }
    if (running_mean.defined()) {
      num_batches_tracked += 1;
      const at::Tensor momentum = options.momentum()
                                      ? at::full({}, *options.momentum(), at::kDouble)
                                      : num_batches_tracked.to(at::kDouble).reciprocal();
      const at::Tensor variance = statistics.m2 / (statistics.count - 1);
      running_mean.copy_(running_mean * (1 - momentum) + statistics.mean * momentum);
      running_var.copy_(running_var * (1 - momentum) + variance * momentum);
    }
  }
  // A Function takes no undefined tensors.
  const at::TensorOptions wide = input.options().dtype(at::kDouble);
  return SyncBatchNormFunction::apply(
      input, weight.defined() ? weight : at::ones({options.num_features()}, wide),
      bias.defined() ? bias : at::zeros({options.num_features()}, wide), statistics, options.eps(),
      comm_);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::parallel::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", ranks=" << comm_->size() << ")";
}

}  // namespace lockstep::parallel
