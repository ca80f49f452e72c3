#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/tools/device/stream_marks.h"

namespace lockstep::data {

// Rows of a dataset as named tensors: field f is (rows, shape of one row of f...), contiguous, on
// the CPU. Fields keep the order in which the dataset made them.
//
//   data::Batch batch;
//   lockstep::ThrowIfError(dataset->ReadInto({0, 5, 2}, batch));
//   at::Tensor images = batch["images"];  // (3, 1, 28, 28) float32
//   at::Tensor labels = batch["labels"];  // (3,) int64
//   at::Tensor there = batch.To("images", world.device());
//
// Memory is used again from one read to the next. A tensor that somebody still holds at the next
// read (a copy of the handle, a view, an autograd graph) is left alone: it keeps its values, and
// the batch allocates another. Not thread-safe.
class Batch {
 public:
  Batch() = default;
  // `pinned`: in page-locked memory, from which a GPU copies while the host goes on. Needs a GPU.
  explicit Batch(bool pinned) : pinned_(pinned) {}
  Batch(Batch&&) = default;
  Batch& operator=(Batch&&) = default;
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // The tensor of a field. A name that is not there is an error of the program: c10::Error, which
  // lists the names that are.
  const at::Tensor& operator[](std::string_view name) const;

  // A field on `device`: itself, where it is there; else a copy. From page-locked memory a GPU
  // takes it on this thread's current stream, between the kernels there, while the host goes on.
  // Reserve waits for all such copies before the memory is written to again; for copies of your own
  // nobody does.
  at::Tensor To(std::string_view name, at::Device device) const;

  // Rows of the first field; 0 while there is none.
  int64_t rows() const;

  // Field names, in order.
  std::vector<std::string> names() const;

  // For datasets: the field `name` as a contiguous tensor of this shape and type, to be written
  // through its data pointer; the first dimension counts rows. Values are undefined. Memory is
  // allocated only where none of the right type and at least this size is free.
  const at::Tensor& Reserve(std::string_view name, at::IntArrayRef sizes, at::ScalarType dtype);

 private:
  struct Field {
    std::string name;
    at::Tensor tensor;
    mutable device::StreamMarks copied;
  };

  const Field& Find(std::string_view name) const;

  std::vector<Field> fields_;
  bool pinned_ = false;
};

}  // namespace lockstep::data
