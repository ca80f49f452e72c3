#include "lockstep/parallel/checkpoint/index.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/parallel/checkpoint/checksum.h"
#include "lockstep/parallel/checkpoint/safetensors_header.h"

namespace lockstep::parallel::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "lockstep checkpoint";
constexpr int kVersion = 1;

Json ToJson(const std::map<std::string, TensorInfo>& tensors) {
  Json json = Json::object();
  for (const auto& [name, info] : tensors) {
    json[name] = {{"dtype", TypeName(info.dtype)}, {"shape", info.sizes}};
  }
  return json;
}

Json ToJson(const ShardInfo& shard) {
  Json pieces = Json::array();
  for (const PieceInfo& piece : shard.pieces) {
    pieces.push_back({{"tensor", piece.tensor},
                      {"begin", piece.begin},
                      {"count", piece.count},
                      {"position", piece.position},
                      {"crc32", piece.checksums}});
  }
  return {{"file", shard.file},
          {"bytes", shard.bytes},
          {"header_bytes", shard.header_bytes},
          {"header_crc32", shard.header_checksum},
          {"pieces", std::move(pieces)}};
}

std::map<std::string, TensorInfo> TensorsFrom(const Json& json) {
  std::map<std::string, TensorInfo> tensors;
  for (const auto& [name, value] : json.items()) {
    // A checksum stands before all this: what cannot be is caught all the same by CheckPieces.
    const auto dtype = TypeNamed(value.at("dtype").get<std::string>());
    tensors[name] = {dtype.value_or(at::ScalarType::Undefined),
                     value.at("shape").get<std::vector<int64_t>>()};
  }
  return tensors;
}

ShardInfo ShardFrom(const Json& json) {
  ShardInfo shard = {.file = json.at("file"),
                     .bytes = json.at("bytes"),
                     .header_bytes = json.at("header_bytes"),
                     .header_checksum = json.at("header_crc32")};
  for (const Json& piece : json.at("pieces")) {
    shard.pieces.push_back({.tensor = piece.at("tensor"),
                            .begin = piece.at("begin"),
                            .count = piece.at("count"),
                            .position = piece.at("position"),
                            .checksums = piece.at("crc32")});
  }
  return shard;
}

Index IndexFrom(const Json& json) {
  Index index = {.step = json.at("step"),
                 .world = json.at("world"),
                 .strategy = json.at("strategy"),
                 .generators = json.at("generators"),
                 .learning_rates = json.at("learning_rates"),
                 .schedules = json.at("schedules"),
                 .notes = json.at("notes"),
                 .tensors = TensorsFrom(json.at("tensors"))};
  for (const Json& shard : json.at("shards")) index.shards.push_back(ShardFrom(shard));
  return index;
}

absl::StatusOr<std::string> Dump(const Json& json) {
  try {
    return json.dump();
  } catch (const Json::type_error& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("names and notes of a checkpoint must be UTF-8: ", error.what()));
  }
}

}  // namespace

int64_t TensorInfo::numel() const {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  return numel;
}

std::string TensorInfo::ToString() const {
  return absl::StrCat(c10::toString(dtype), " [", absl::StrJoin(sizes, ", "), "]");
}

absl::Status CheckPieces(const Index& index) {
  std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> ranges;
  for (const ShardInfo& shard : index.shards) {
    for (const PieceInfo& piece : shard.pieces) {
      const auto info = index.tensors.find(piece.tensor);
      if (info == index.tensors.end() || info->second.dtype == at::ScalarType::Undefined) {
        return absl::InternalError(absl::StrCat(shard.file, " holds tensor '", piece.tensor,
                                                "', which is not listed or of an unknown dtype"));
      }
      const auto bytes = static_cast<uint64_t>(piece.count) * c10::elementSize(info->second.dtype);
      const uint64_t chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
      if (piece.count <= 0 || piece.checksums.size() != chunks ||
          piece.position < shard.header_bytes || piece.position + bytes > shard.bytes) {
        return absl::InternalError(
            absl::StrCat(shard.file, ": the entry of tensor '", piece.tensor, "' is senseless"));
      }
      ranges[piece.tensor].emplace_back(piece.begin, piece.begin + piece.count);
    }
  }
  for (const auto& [name, info] : index.tensors) {
    std::vector<std::pair<int64_t, int64_t>>& parts = ranges[name];
    std::sort(parts.begin(), parts.end());
    int64_t end = 0;
    for (const auto& [begin, part_end] : parts) {
      if (begin != end) {
        return absl::InternalError(absl::StrCat(
            "elements ", std::min(begin, end), " to ", std::max(begin, end), " of tensor '", name,
            begin > end ? "' are in no shard" : "' are in two shards"));
      }
      end = part_end;
    }
    if (end != info.numel()) {
      return absl::InternalError(absl::StrCat("the shards hold ", end, " elements of tensor '",
                                              name, "', which has ", info.numel()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> FormatIndex(const Index& index) {
  Json shards = Json::array();
  for (const ShardInfo& shard : index.shards) shards.push_back(ToJson(shard));
  const Json content = {{"step", index.step},
                        {"world", index.world},
                        {"strategy", index.strategy},
                        {"generators", index.generators},
                        {"learning_rates", index.learning_rates},
                        {"schedules", index.schedules},
                        {"notes", Json(index.notes)},
                        {"tensors", ToJson(index.tensors)},
                        {"shards", std::move(shards)}};
  absl::StatusOr<std::string> text = Dump(content);
  if (!text.ok()) return text.status();
  return absl::StrCat("{\"format\":\"", kFormat, "\",\"version\":", kVersion,
                      ",\"crc32\":", Checksum(*text), ",\"content\":", *text, "}\n");
}

absl::StatusOr<Index> ParseIndex(const std::string& text) {
  try {
    const Json json = Json::parse(text);
    if (json.at("format") != kFormat) return absl::DataLossError("is no index of a checkpoint");
    if (json.at("version") != kVersion) {
      return absl::DataLossError(absl::StrCat("has version ", json.at("version").dump(),
                                              " of the format; this program knows ", kVersion));
    }
    const Json& content = json.at("content");
    if (json.at("crc32") != Checksum(content.dump())) {
      return absl::DataLossError("is not what was saved: its checksum differs");
    }
    Index index = IndexFrom(content);
    const absl::Status status = CheckPieces(index);
    if (!status.ok()) return absl::DataLossError(std::string{status.message()});
    return index;
  } catch (const Json::exception& error) {
    return absl::DataLossError(absl::StrCat("is no index of a checkpoint: ", error.what()));
  }
}

absl::StatusOr<std::string> FormatReport(const ShardReport& report) {
  return Dump({{"shard", ToJson(report.shard)}, {"tensors", ToJson(report.tensors)}});
}

absl::StatusOr<ShardReport> ParseReport(const std::string& text) {
  try {
    const Json json = Json::parse(text);
    return ShardReport{ShardFrom(json.at("shard")), TensorsFrom(json.at("tensors"))};
  } catch (const Json::exception& error) {
    return absl::InternalError(absl::StrCat("the report of a shard is garbled: ", error.what()));
  }
}

}  // namespace lockstep::parallel::checkpoint
