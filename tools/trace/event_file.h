#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep::trace {

// Numbers over the steps of a run, for TensorBoard to draw:
//
//   auto events = trace::EventFile::Create("/tmp/runs/ddp");  // tensorboard --logdir=/tmp/runs
//   absl::Status status = (*events)->Add("train/loss", step, loss);
//
// Writes one file, events.out.tfevents.SECONDS.HOST.PID, as TensorFlow's SummaryWriter does:
// TFRecords (length and data, each with a masked CRC-32C) of Event messages
// (tensorflow/core/util/event.proto, tensorflow/core/lib/io/record_writer.h). The messages are put
// together here: they have five fields between them, and a protobuf library besides the one inside
// LibTorch is asking for trouble.
//
// What was added can be read at once; a run that is killed leaves what it had added. Not
// thread-safe.
class EventFile {
 public:
  // Makes the folder where it is not there. Unavailable: that, or a file in it, cannot be made.
  static absl::StatusOr<std::unique_ptr<EventFile>> Create(const std::string& folder);

  // `tag` names the curve; what is before a "/" in it, a group of them. Values are kept in 32 bits.
  // Unavailable: the file cannot be written, as when a disk is full.
  [[nodiscard]] absl::Status Add(std::string_view tag, int64_t step, double value);

  const std::string& path() const { return path_; }

 private:
  explicit EventFile(std::string path);

  absl::Status Write(const std::string& event);

  const std::string path_;
  std::ofstream out_;
};

// CRC-32C (Castagnoli) of some bytes, RFC 3720 B.4.
uint32_t Crc32c(std::string_view bytes);

}  // namespace lockstep::trace
