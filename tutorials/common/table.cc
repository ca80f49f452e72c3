#include "lockstep/tutorials/common/table.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lockstep::tutorials {
namespace {

size_t Width(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;  // not a byte that continues a character
  });
}

}  // namespace

Table::Table(const std::vector<std::string>& headers) : columns_(headers.size()) {
  for (size_t column = 0; column < columns_; ++column) {
    const std::vector<std::string> parts = absl::StrSplit(headers[column], '\n');
    header_lines_ = std::max(header_lines_, parts.size());
    if (lines_.size() < header_lines_) {
      lines_.resize(header_lines_, std::vector<std::string>(columns_));
    }
    for (size_t line = 0; line < parts.size(); ++line) lines_[line][column] = parts[line];
  }
}

void Table::AddRow(std::vector<std::string> cells) {
  if (cells.size() != columns_) {
    throw std::invalid_argument(
        absl::StrCat("a row of ", cells.size(), " cells in a table of ", columns_, " columns"));
  }
  lines_.push_back(std::move(cells));
}

std::string Table::ToString() const {
  std::vector<size_t> widths(columns_);
  for (const std::vector<std::string>& line : lines_) {
    for (size_t i = 0; i < columns_; ++i) widths[i] = std::max(widths[i], Width(line[i]));
  }
  std::vector<std::vector<std::string>> lines = lines_;
  std::vector<std::string> rule;
  for (size_t width : widths) rule.push_back(std::string(width, '-'));
  lines.insert(lines.begin() + static_cast<std::ptrdiff_t>(header_lines_), rule);

  std::string text;
  for (const std::vector<std::string>& line : lines) {
    std::string row;
    for (size_t i = 0; i < columns_; ++i) {
      const std::string blanks(widths[i] - Width(line[i]), ' ');
      absl::StrAppend(&row, i == 0 ? "" : "  ", i == 0 ? line[i] : blanks,
                      i == 0 ? blanks : line[i]);
    }
    absl::StripTrailingAsciiWhitespace(&row);
    absl::StrAppend(&text, row, "\n");
  }
  return text;
}

}  // namespace lockstep::tutorials
