#include "lockstep/data/mnist/idx.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace lockstep::data::mnist {
namespace {

constexpr uint32_t kUnsignedBytes = 0x08;  // type code, the third byte of an IDX file

absl::Status Damaged(const std::string& path, const std::string& how) {
  return absl::DataLossError(absl::StrCat(path, ": ", how, "; fetch the file again"));
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (file && file.peek() != std::ifstream::traits_type::eof()) content << file.rdbuf();
  if (!file.is_open() || file.bad() || content.bad()) {
    const std::string message = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::DataLossError(message);
  }
  return std::move(content).str();
}

// Not gzread: it takes what is no gzip file as it is, and ignores what follows the end.
absl::StatusOr<std::string> Gunzip(const std::string& path, std::string compressed) {
  if (!absl::StartsWith(compressed, "\x1f\x8b")) {
    return Damaged(path, "is named .gz, but is not a gzip file");
  }
  z_stream stream = {};
  stream.next_in = reinterpret_cast<Bytef*>(compressed.data());
  stream.avail_in = compressed.size();
  constexpr int kGzip = 16;  // added to the window's bits: a gzip header, not a zlib one
  if (inflateInit2(&stream, MAX_WBITS + kGzip) != Z_OK) {
    return absl::ResourceExhaustedError(absl::StrCat(path, ": no memory to decompress it"));
  }
  std::string plain;
  int result = Z_OK;
  while (result == Z_OK) {
    const size_t done = plain.size();
    plain.resize(std::max<size_t>(size_t{1} << 20, 2 * done));
    stream.next_out = reinterpret_cast<Bytef*>(plain.data()) + done;
    stream.avail_out = plain.size() - done;
    result = inflate(&stream, Z_NO_FLUSH);
    plain.resize(plain.size() - stream.avail_out);
  }
  const size_t rest = stream.avail_in;
  const std::string reason = stream.msg != nullptr ? stream.msg : "no reason given";
  inflateEnd(&stream);
  if (result == Z_BUF_ERROR) {
    return Damaged(path, "the gzip file is cut off");
  }
  if (result != Z_STREAM_END) {
    return Damaged(path, absl::StrCat("the gzip file is damaged (", reason, ")"));
  }
  if (rest != 0) {
    return Damaged(path, absl::StrCat(rest, " bytes follow the end of the gzip file"));
  }
  return plain;
}

uint32_t BigEndian(const std::string& bytes, size_t offset) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[offset + i]);
  return value;
}

}  // namespace

absl::StatusOr<IdxArray> ReadIdx(const std::string& path, int dimensions) {
  absl::StatusOr<std::string> content = ReadFile(path);
  if (content.ok() && absl::EndsWith(path, ".gz")) content = Gunzip(path, *std::move(content));
  if (!content.ok()) return content.status();

  const size_t header = 4 + 4 * dimensions;
  const uint32_t magic = kUnsignedBytes << 8 | dimensions;
  if (content->size() >= 4 && BigEndian(*content, 0) != magic) {
    return Damaged(path, absl::StrFormat("magic number is 0x%08x, but an IDX file of bytes with %d "
                                         "dimensions has 0x%08x",
                                         BigEndian(*content, 0), dimensions, magic));
  }
  if (content->size() < header) {
    return Damaged(path, absl::StrCat("is cut off: ", content->size(),
                                      " bytes, of which the header", " alone takes ", header));
  }
  IdxArray array;
  unsigned __int128 count = 1;  // each size is below 2^32, so that three cannot overflow
  for (int i = 0; i < dimensions; ++i) {
    array.sizes.push_back(BigEndian(*content, 4 + 4 * i));
    count *= array.sizes.back();
  }
  const size_t present = content->size() - header;
  if (count != present) {
    return Damaged(path, absl::StrCat(count > present ? "is cut off" : "goes on after its end",
                                      ": its header promises ", absl::StrJoin(array.sizes, " x "),
                                      " bytes of values, it has ", present));
  }
  array.values = content->substr(header);
  return array;
}

}  // namespace lockstep::data::mnist
