#pragma once

#include <string>
#include <vector>

namespace lockstep::tutorials {

// A table of text: the first column is aligned on the left, the others on the right. Columns are as
// wide as their widest cell, in characters (UTF-8, one column of the terminal each). A header may
// have several lines, the last of which is best the unit.
//
//   tutorials::Table table({"strategy", "step\nms", "memory\nMiB"});
//   table.AddRow({"ddp", InMilliseconds(step), InMebibytes(bytes)});
//   std::cout << table.ToString();
//
//   strategy  step  memory
//               ms     MiB
//   --------  ----  ------
//   ddp       12.3    4.58
class Table {
 public:
  explicit Table(const std::vector<std::string>& headers);

  // Throws std::invalid_argument unless there are as many cells as headers.
  void AddRow(std::vector<std::string> cells);

  // Every line ends with a newline, and none with a blank.
  std::string ToString() const;

 private:
  const size_t columns_;
  size_t header_lines_ = 0;
  std::vector<std::vector<std::string>> lines_;
};

}  // namespace lockstep::tutorials
