#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep::parallel::checkpoint {

// Named tensors in a file that Python's `safetensors` package reads and writes, byte for byte.
// Format: https://huggingface.co/docs/safetensors: a header of JSON, then the raw values.
//
//   // C++                                              // Python
//   SaveModule(*model, "mlp.safetensors");              load_file("mlp.safetensors")
//   LoadInto(*model, "mlp.safetensors");                save_file(model.state_dict(), ...)
//
// Types: float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, complex64, bool and all
// integers of 8 to 64 bits. Files are written for and read on little-endian machines only.

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Metadata = std::map<std::string, std::string>;

struct SafetensorsFile {
  NamedTensors tensors;  // On the CPU, in the order of their values in the file.
  Metadata metadata;
};

// Writes `tensors`, of any device and layout in memory, to `path`. Atomic: a reader, or a machine
// that comes up after a crash, sees the file that was there before or the whole new one; it is
// written under another name in the same folder, flushed to disk and renamed.
//
// INVALID_ARGUMENT for a name given twice or that is no UTF-8, an undefined tensor and a type that
// the format does not have. NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED (disk full) or
// UNAVAILABLE, with `path`, where the file cannot be written; nothing is left behind then.
absl::Status WriteSafetensors(const std::string& path, const NamedTensors& tensors,
                              const Metadata& metadata = {});

// Reads a whole file. NOT_FOUND where there is none; DATA_LOSS, naming the file and the tensor, for
// one that is cut off or goes on after its end, whose header is no JSON or lacks something, whose
// tensors overlap, leave gaps or are outside the file, or have a type that is not known here.
// Memory for values is allocated only after all this was checked.
absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path);

// Parameters and buffers of a module by name, as a Python state dict has them: "fc1.weight".
// The tensors are the module's own, detached from autograd.
NamedTensors StateDict(const torch::nn::Module& module);

// Writes StateDict(module). Sharded modules hold a slice only: unshard them first.
absl::Status SaveModule(const torch::nn::Module& module, const std::string& path);

// Copies a file's values into the parameters and buffers of the same names, on whatever device
// they are. Names, shapes and types must agree exactly: INVALID_ARGUMENT names the first that does
// not, and nothing was changed. Call it before a strategy shards the module.
absl::Status LoadInto(torch::nn::Module& module, const std::string& path);

}  // namespace lockstep::parallel::checkpoint
