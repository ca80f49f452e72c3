#include "lockstep/parallel/checkpoint/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lockstep::parallel::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr char kMetadata[] = "__metadata__";

struct NamedType {
  at::ScalarType dtype;
  const char* name;
};

// In the order of the Python package's file writer.
constexpr std::array<NamedType, 16> kTypes = {{
    {at::kUInt64, "U64"},
    {at::kLong, "I64"},
    {at::kDouble, "F64"},
    {at::kComplexFloat, "C64"},
    {at::kFloat, "F32"},
    {at::kUInt32, "U32"},
    {at::kInt, "I32"},
    {at::kBFloat16, "BF16"},
    {at::kHalf, "F16"},
    {at::kUInt16, "U16"},
    {at::kShort, "I16"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kFloat8_e5m2, "F8_E5M2"},
    {at::kChar, "I8"},
    {at::kByte, "U8"},
    {at::kBool, "BOOL"},
}};

absl::Status Bad(const std::string& what) {
  return absl::DataLossError(absl::StrCat("header: ", what));
}

// nlohmann::json keeps the last of two values with one name: whichever was meant, half of such a
// file is lost.
absl::StatusOr<ordered_json> ParseJson(const std::string& text) {
  std::vector<std::set<std::string>> names;  // of the objects that are open
  std::string twice;
  auto check = [&](int /*depth*/, ordered_json::parse_event_t event, ordered_json& value) {
    if (event == ordered_json::parse_event_t::object_start) names.emplace_back();
    if (event == ordered_json::parse_event_t::object_end) names.pop_back();
    if (event == ordered_json::parse_event_t::key) {
      const std::string name = value.get<std::string>();
      if (!names.back().insert(name).second) twice = name;
    }
    return true;
  };
  try {
    ordered_json json = ordered_json::parse(text, check);
    if (!twice.empty()) return Bad(absl::StrCat("the name '", twice, "' occurs twice"));
    if (!json.is_object()) return Bad("is not a JSON object");
    return json;
  } catch (const ordered_json::parse_error& error) {
    return Bad(absl::StrCat("is not JSON: ", error.what()));
  }
}

// Bytes of a tensor; nothing where they do not fit 63 bits.
std::optional<uint64_t> Bytes(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  uint64_t bytes = c10::elementSize(dtype);
  for (int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) return std::nullopt;
  }
  if (bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return bytes;
}

bool AreSizes(const ordered_json& json) {
  return json.is_array() && std::all_of(json.begin(), json.end(), [](const ordered_json& size) {
           return size.is_number_unsigned() &&
                  size.get<uint64_t>() <=
                      static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
         });
}

absl::StatusOr<TensorEntry> ParseEntry(const std::string& name, const ordered_json& json) {
  const std::string tensor = absl::StrCat("tensor '", name, "' ");
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!json.is_object() || !json.contains(key)) {
      return Bad(absl::StrCat(tensor, "has no ", key));
    }
  }
  const ordered_json& dtype = json["dtype"];
  const auto* type = std::find_if(kTypes.begin(), kTypes.end(),
                                  [&dtype](const NamedType& t) { return dtype == t.name; });
  if (type == kTypes.end()) return Bad(absl::StrCat(tensor, "has unknown dtype ", dtype.dump()));
  const ordered_json& shape = json["shape"];
  if (!AreSizes(shape)) return Bad(absl::StrCat(tensor, "has a bad shape ", shape.dump()));
  const ordered_json& offsets = json["data_offsets"];
  if (!AreSizes(offsets) || offsets.size() != 2 || offsets[0] > offsets[1]) {
    return Bad(absl::StrCat(tensor, "has bad data_offsets ", offsets.dump()));
  }
  TensorEntry entry = {name, type->dtype, shape.get<std::vector<int64_t>>(),
                       offsets[0].get<uint64_t>(), offsets[1].get<uint64_t>()};
  const std::optional<uint64_t> bytes = Bytes(entry.shape, entry.dtype);
  if (bytes != entry.end - entry.begin) {
    return Bad(absl::StrCat(tensor, "of ", type->name, " ", shape.dump(), " does not take the ",
                            entry.end - entry.begin, " bytes between its data_offsets"));
  }
  return entry;
}

// Values must fill the file without gap or overlap: else it is not what was written.
absl::Status CheckOffsets(const std::vector<TensorEntry>& entries, uint64_t value_bytes) {
  uint64_t end = 0;
  for (const TensorEntry& entry : entries) {
    const std::string where =
        absl::StrCat("tensor '", entry.name, "' has values from ", entry.begin, " to ", entry.end);
    if (entry.end > value_bytes) {
      return Bad(absl::StrCat(where, ", but the file holds ", value_bytes,
                              " bytes of values: it is cut off"));
    }
    if (entry.begin < end) return Bad(absl::StrCat(where, ", which overlap those of another"));
    if (entry.begin > end) return Bad(absl::StrCat(where, ", which leaves a gap from ", end));
    end = entry.end;
  }
  if (end != value_bytes) {
    return Bad(absl::StrCat("tensors end at ", end, ", but the file holds ", value_bytes,
                            " bytes of values"));
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<int> TypeOrder(at::ScalarType dtype) {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].dtype == dtype) return static_cast<int>(i);
  }
  return std::nullopt;
}

std::string TypeName(at::ScalarType dtype) { return kTypes[*TypeOrder(dtype)].name; }

std::optional<at::ScalarType> TypeNamed(const std::string& name) {
  for (const NamedType& type : kTypes) {
    if (type.name == name) return type.dtype;
  }
  return std::nullopt;
}

absl::StatusOr<std::string> FormatHeader(const Header& header) {
  ordered_json json = ordered_json::object();
  if (!header.metadata.empty()) json[kMetadata] = header.metadata;
  for (const TensorEntry& entry : header.entries) {
    json[entry.name] = {{"dtype", TypeName(entry.dtype)},
                        {"shape", entry.shape},
                        {"data_offsets", {entry.begin, entry.end}}};
  }
  try {
    std::string text = json.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text;
  } catch (const ordered_json::type_error& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("names and metadata must be UTF-8: ", error.what()));
  }
}

absl::StatusOr<Header> ParseHeader(const std::string& text, uint64_t value_bytes) {
  absl::StatusOr<ordered_json> json = ParseJson(text);
  if (!json.ok()) return json.status();
  Header header;
  for (const auto& [name, value] : json->items()) {
    if (name != kMetadata) {
      absl::StatusOr<TensorEntry> entry = ParseEntry(name, value);
      if (!entry.ok()) return entry.status();
      header.entries.push_back(*std::move(entry));
      continue;
    }
    if (!value.is_object()) return Bad("__metadata__ is not an object");
    for (const auto& [key, text_value] : value.items()) {
      if (!text_value.is_string()) {
        return Bad(absl::StrCat("__metadata__ '", key, "' is not a string"));
      }
      header.metadata[key] = text_value.get<std::string>();
    }
  }
  std::stable_sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  absl::Status status = CheckOffsets(header.entries, value_bytes);
  if (!status.ok()) return status;
  return header;
}

}  // namespace lockstep::parallel::checkpoint
