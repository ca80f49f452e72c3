#pragma once

#include <torch/nn/module.h>

#include <functional>

#include "lockstep/parallel/unit.h"

namespace lockstep::parallel {

// Activation recomputation (checkpointing): trades a second forward for memory.
//
//   models::Vit model;
//   parallel::Recompute(*model, [](const parallel::NamedUnit& unit) {
//     return unit.name.starts_with("blocks.");
//   });
//   parallel::Fsdp fsdp(model, comm);  // or Ddp, None, ...; before or after, to the same effect
//
// MEMORY. Of a recomputed Unit forward keeps the inputs alone, and not what its layers keep for
// backward, which runs forward again when it arrives at the Unit. With n like blocks, each
// recomputed, the peak of activations falls from n times a block's to one block's and n inputs; the
// time of a step grows by up to a third, as forward is about a third of it. With Units inside
// recomputed Units recomputed too, less still is kept, and the innermost runs forward three times.
// See Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
//
// WHAT COMES OUT is what would without it, bit for bit where the kernels are deterministic:
//   - random layers (dropout) draw the same numbers again from the default generators of the CPU
//     and of the devices of inputs and parameters, and the generators go on afterwards as if
//     nothing had been drawn. Ranks that are threads share the CPU's: their random layers draw what
//     they will, with recomputation or without, and must not be recomputed;
//   - forward runs again in the autocast state that it ran in; weights cast by autocast are not
//     cached inside a recomputed Unit;
//   - buffers that forward updates (BatchNorm's running statistics) are updated once. The second
//     run works on copies, and sees what the first left.
//
// HOOKS of the Unit itself run once, around the first forward; those of Units below it run in each.
// Gradients arrive at parameters as ever, each parameter's all at once when backward has passed the
// Unit: hooks on tensors and on accumulation fire once. No parameter's value is kept from forward
// to backward, so that FSDP may free and gather it again in between.
//
// THE FORWARD of a recomputed Unit
//   - is a function of its arguments, of the module's parameters and buffers, and of random numbers
//     that come from the default generators; between forward and backward, module and arguments
//     stay as they are, those that are no tensors included;
//   - does not change its arguments in place;
//   - uses no tensor that requires a gradient but those among its arguments that hooks see (see
//     unit.h) and the parameters of its module and the modules below it;
//   - returns all that gradients are to come from: what it leaves in members has none.
// Each floating-point tensor of its result requires a gradient, also where forward detached it; a
// gradient that arrives there goes no further. Parameters that forward does not use get none.
//
// ERRORS. c10::Error: out of forward, where it takes arguments by reference to what is not const or
// changes a tensor among them in place; out of backward, where forward uses another tensor that
// requires a gradient, where the second run gives other shapes or dtypes than the first, and for
// double backward (create_graph), which recomputation has not.

// Recomputes from now on the Units that `which` accepts, of all that FindUnits(model) finds. Throws
// c10::Error where it accepts none.
void Recompute(torch::nn::Module& model, const std::function<bool(const NamedUnit& unit)>& which);

// The same for one Unit, and back.
void SetRecompute(UnitModule& unit, bool recompute);

}  // namespace lockstep::parallel
