#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep::parallel::checkpoint {

// A tensor of a checkpoint, whole.
struct TensorInfo {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;

  int64_t numel() const;
  std::string ToString() const;  // "Float [7, 15]"
  friend bool operator==(const TensorInfo&, const TensorInfo&) = default;
};

// A range of a tensor, flattened row by row, and where it is in a shard's file.
struct PieceInfo {
  std::string tensor;
  int64_t begin = 0;  // elements
  int64_t count = 0;
  uint64_t position = 0;            // of its first byte in the file
  std::vector<uint32_t> checksums;  // CRC-32 of each kChunkBytes of it, the last one shorter
};

// So large that checksums are few, so small that a reader of a part reads little too much.
inline constexpr int64_t kChunkBytes = int64_t{1} << 20;

struct ShardInfo {
  std::string file;
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;  // before the first value
  uint32_t header_checksum = 0;
  std::vector<PieceInfo> pieces;
};

// What a checkpoint holds and where: index.json. Written last, so it describes a whole checkpoint.
struct Index {
  int64_t step = 0;
  int world = 1;                       // ranks that saved it: one shard each
  std::string strategy;                // under which it was saved
  int generators = 0;                  // a rank
  std::vector<double> learning_rates;  // of the optimizer's parameter groups
  std::vector<int64_t> schedules;      // steps of each learning-rate scheduler
  std::map<std::string, std::string> notes;
  std::map<std::string, TensorInfo> tensors;
  std::vector<ShardInfo> shards;
};

inline constexpr char kIndexFile[] = "index.json";

// The text of the file, with a checksum of itself. INVALID_ARGUMENT where names or notes are not
// UTF-8.
absl::StatusOr<std::string> FormatIndex(const Index& index);

// Reads and checks it: DATA_LOSS, without the file's name, where it is not what FormatIndex wrote,
// or where the pieces do not make up every tensor exactly once.
absl::StatusOr<Index> ParseIndex(const std::string& text);

// What CheckPieces finds wrong in an index that is being made: INTERNAL there.
absl::Status CheckPieces(const Index& index);

// What one rank tells rank 0 of its part, as text: its shard and the tensors that it knows.
struct ShardReport {
  ShardInfo shard;
  std::map<std::string, TensorInfo> tensors;
};
absl::StatusOr<std::string> FormatReport(const ShardReport& report);
absl::StatusOr<ShardReport> ParseReport(const std::string& text);

}  // namespace lockstep::parallel::checkpoint
