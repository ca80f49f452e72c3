#include "lockstep/data/hdf5/filters.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lockstep::data::hdf5 {
namespace {

constexpr size_t kChecksumBytes = 4;

uint32_t LittleEndian(const uint8_t* bytes) {
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
}

// What HDF5 before 1.6.3 stored on little-endian machines.
uint32_t SwapInHalves(uint32_t sum) { return (sum & 0x00ff00ff) << 8 | (sum & 0xff00ff00) >> 8; }

template <size_t kBytes>
void UnshuffleElements(const uint8_t* from, size_t count, uint8_t* to) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t b = 0; b < kBytes; ++b) to[i * kBytes + b] = from[b * count + i];
  }
}

}  // namespace

uint32_t Fletcher32(absl::Span<const uint8_t> bytes) {
  const auto fold = [](uint32_t sum) { return (sum & 0xffff) + (sum >> 16); };
  uint32_t first = 0;
  uint32_t second = 0;
  size_t i = 0;
  const size_t words_end = bytes.size() / 2 * 2;
  while (i < words_end) {
    // After 360 words the second sum may not fit 32 bits any more.
    const size_t end = std::min(words_end, i + 2 * 360);
    for (; i < end; i += 2) {
      first += static_cast<uint32_t>(bytes[i]) << 8 | bytes[i + 1];
      second += first;
    }
    first = fold(first);
    second = fold(second);
  }
  if (words_end != bytes.size()) {
    first += static_cast<uint32_t>(bytes[words_end]) << 8;
    second += first;
    first = fold(first);
    second = fold(second);
  }
  return fold(second) << 16 | fold(first);
}

void Unshuffle(absl::Span<const uint8_t> from, size_t element_bytes, uint8_t* to) {
  const size_t count = element_bytes < 2 ? 0 : from.size() / element_bytes;
  const size_t whole = count * element_bytes;
  switch (element_bytes) {
    case 2:
      UnshuffleElements<2>(from.data(), count, to);
      break;
    case 4:
      UnshuffleElements<4>(from.data(), count, to);
      break;
    case 8:
      UnshuffleElements<8>(from.data(), count, to);
      break;
    default:
      for (size_t i = 0; i < count; ++i) {
        for (size_t b = 0; b < element_bytes; ++b) {
          to[i * element_bytes + b] = from[b * count + i];
        }
      }
  }
  std::copy(from.begin() + whole, from.end(), to + whole);
}

Decoder::~Decoder() {
  if (stream_ready_) inflateEnd(&stream_);
}

std::string Decoder::Inflate(absl::Span<const uint8_t> from, absl::Span<uint8_t> to,
                             size_t* bytes) {
  if ((stream_ready_ ? inflateReset(&stream_) : inflateInit(&stream_)) != Z_OK) {
    return "there is no memory to decompress it";
  }
  stream_ready_ = true;
  stream_.next_in = const_cast<Bytef*>(from.data());
  stream_.avail_in = from.size();
  stream_.next_out = to.data();
  stream_.avail_out = to.size();
  const int result = inflate(&stream_, Z_FINISH);
  *bytes = to.size() - stream_.avail_out;
  if (result == Z_STREAM_END) return "";
  if (result == Z_BUF_ERROR && stream_.avail_in != 0) {
    return absl::StrCat("it decompresses to more than its ", to.size(), " bytes");
  }
  if (result == Z_BUF_ERROR) return "its compressed bytes end too early";
  return absl::StrCat("its compressed bytes are damaged (",
                      stream_.msg != nullptr ? stream_.msg : "no reason given", ")");
}

std::string Decoder::Decode(const std::vector<Filter>& filters, uint32_t skipped,
                            absl::Span<const uint8_t> stored, absl::Span<uint8_t> plain) {
  std::vector<const Filter*> steps;  // in the order in which they are undone
  size_t checksums = 0;
  for (size_t i = filters.size(); i-- > 0;) {
    if (skipped >> i & 1) continue;
    steps.push_back(&filters[i]);
    checksums += filters[i].kind == Filter::kFletcher32;
  }
  absl::Span<const uint8_t> now = stored;
  size_t buffer = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i]->kind == Filter::kFletcher32) {
      if (now.size() < kChecksumBytes) return "it is too short to have a checksum";
      const absl::Span<const uint8_t> content = now.first(now.size() - kChecksumBytes);
      const uint32_t expected = LittleEndian(content.data() + content.size());
      const uint32_t sum = Fletcher32(content);
      if (sum != expected && sum != SwapInHalves(expected)) return "its checksum is wrong";
      now = content;
      continue;
    }
    const bool direct = i + 1 == steps.size();
    std::vector<uint8_t>& scratch = scratch_[buffer];
    buffer = 1 - buffer;
    if (!direct) scratch.resize(plain.size() + kChecksumBytes * checksums);
    const absl::Span<uint8_t> to = direct ? plain : absl::MakeSpan(scratch);
    size_t bytes = now.size();
    if (steps[i]->kind == Filter::kDeflate) {
      std::string wrong = Inflate(now, to, &bytes);
      if (!wrong.empty()) return wrong;
    } else {
      if (bytes > to.size()) {
        return absl::StrCat("it has ", bytes, " bytes and not ", plain.size());
      }
      Unshuffle(now, steps[i]->element_bytes, to.data());
    }
    now = to.first(bytes);
  }
  if (now.size() != plain.size()) {
    return absl::StrCat("it has ", now.size(), " bytes and not ", plain.size());
  }
  if (now.data() != plain.data()) std::memcpy(plain.data(), now.data(), plain.size());
  return "";
}

}  // namespace lockstep::data::hdf5
