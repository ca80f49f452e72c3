#include "lockstep/parallel/checkpoint/safetensors.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "lockstep/parallel/checkpoint/atomic_file.h"
#include "lockstep/parallel/checkpoint/safetensors_header.h"

namespace lockstep::parallel::checkpoint {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the Python package's limit

absl::Status At(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status Check(const NamedTensors& tensors) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) {
    std::string wrong;
    if (!names.insert(name).second || name == "__metadata__") {
      wrong = name == "__metadata__" ? "has a name that the format reserves" : "is given twice";
    } else if (!tensor.defined()) {
      wrong = "is undefined";
    } else if (!TypeOrder(tensor.scalar_type()).has_value()) {
      wrong = absl::StrCat("has type ", c10::toString(tensor.scalar_type()),
                           ", which safetensors files cannot hold");
    }
    if (!wrong.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' ", wrong));
    }
  }
  return absl::OkStatus();
}

absl::Status WriteValues(AtomicFile& file, const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor values = tensor.detach().cpu().contiguous();
    absl::Status status = file.Write(values.const_data_ptr(), values.nbytes());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<Header> ReadHeader(std::ifstream& file, uint64_t file_bytes) {
  uint64_t length = 0;
  if (file_bytes < kLengthBytes || !file.read(reinterpret_cast<char*>(&length), kLengthBytes)) {
    return absl::DataLossError(
        absl::StrCat("is cut off: ", file_bytes, " bytes are not even the length of the header"));
  }
  if (length > kMaxHeaderBytes) {
    return absl::DataLossError(absl::StrCat("is no safetensors file: its header would have ",
                                            length, " bytes, more than the format allows"));
  }
  if (length > file_bytes - kLengthBytes) {
    return absl::DataLossError(absl::StrCat("is cut off: its header has ", length, " bytes, but ",
                                            file_bytes - kLengthBytes, " are there"));
  }
  std::string text(length, '\0');
  if (!file.read(text.data(), length)) return absl::DataLossError("cannot be read");
  return ParseHeader(text, file_bytes - kLengthBytes - length);
}

std::string Describe(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), " ", c10::str(tensor.sizes()));
}

absl::Status CheckSame(const NamedTensors& state, const std::map<std::string, at::Tensor>& values) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : state) {
    names.insert(name);
    const auto value = values.find(name);
    if (value == values.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("has no tensor '", name, "', which the module has"));
    }
    if (value->second.sizes() != tensor.sizes() ||
        value->second.scalar_type() != tensor.scalar_type()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "' is ",
                                                     Describe(value->second),
                                                     ", but the module's is ", Describe(tensor)));
    }
  }
  for (const auto& [name, tensor] : values) {
    if (names.count(name) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("has a tensor '", name, "', which the module does not have"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteSafetensors(const std::string& path, const NamedTensors& tensors,
                              const Metadata& metadata) {
  absl::Status status = Check(tensors);
  if (!status.ok()) return At(path, status);
  NamedTensors sorted = tensors;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return std::pair(TypeOrder(a.second.scalar_type()), a.first) <
           std::pair(TypeOrder(b.second.scalar_type()), b.first);
  });
  Header header = {.entries = {}, .metadata = metadata};
  uint64_t end = 0;
  for (const auto& [name, tensor] : sorted) {
    const uint64_t begin = std::exchange(end, end + tensor.nbytes());
    header.entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), begin, end});
  }
  absl::StatusOr<std::string> text = FormatHeader(header);
  if (!text.ok()) return At(path, text.status());

  AtomicFile file(path);
  const uint64_t length = text->size();
  status = file.Write(&length, kLengthBytes);
  if (status.ok()) status = file.Write(text->data(), length);
  if (status.ok()) status = WriteValues(file, sorted);
  return status.ok() ? file.Commit() : status;
}

absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path) {
  std::error_code error;
  const uint64_t file_bytes = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) {
    if (!error) error = std::make_error_code(std::errc::permission_denied);
    const std::string message = absl::StrCat(path, ": ", error.message());
    return error == std::errc::no_such_file_or_directory ? absl::NotFoundError(message)
                                                         : absl::DataLossError(message);
  }
  absl::StatusOr<Header> header = ReadHeader(file, file_bytes);
  if (!header.ok()) return At(path, header.status());
  SafetensorsFile content = {.tensors = {}, .metadata = std::move(header->metadata)};
  for (const TensorEntry& entry : header->entries) {
    at::Tensor tensor = at::empty(entry.shape, entry.dtype);
    if (!file.read(static_cast<char*>(tensor.mutable_data_ptr()), entry.end - entry.begin)) {
      return At(path,
                absl::DataLossError(absl::StrCat("tensor '", entry.name, "' cannot be read")));
    }
    content.tensors.emplace_back(entry.name, std::move(tensor));
  }
  return content;
}

NamedTensors StateDict(const torch::nn::Module& module) {
  NamedTensors state;
  for (const auto& parameter : module.named_parameters()) {
    state.emplace_back(parameter.key(), parameter.value().detach());
  }
  for (const auto& buffer : module.named_buffers()) {
    state.emplace_back(buffer.key(), buffer.value().detach());
  }
  return state;
}

absl::Status SaveModule(const torch::nn::Module& module, const std::string& path) {
  return WriteSafetensors(path, StateDict(module));
}

absl::Status LoadInto(torch::nn::Module& module, const std::string& path) {
  absl::StatusOr<SafetensorsFile> file = ReadSafetensors(path);
  if (!file.ok()) return file.status();
  const std::map<std::string, at::Tensor> values(file->tensors.begin(), file->tensors.end());
  const NamedTensors state = StateDict(module);
  absl::Status status = CheckSame(state, values);
  if (!status.ok()) return At(path, status);
  torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : state) tensor.copy_(values.at(name));
  return absl::OkStatus();
}

}  // namespace lockstep::parallel::checkpoint
