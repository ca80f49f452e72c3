#include "lockstep/tutorials/common/command_line.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lockstep::tutorials {
namespace {

constexpr size_t kColumn = 26;  // where the descriptions begin
constexpr size_t kWidth = 100;

// Letters to insert, delete or replace to make `b` of `a` (Levenshtein).
size_t Distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

absl::Status UnknownFlag(const std::string& name) {
  std::string nearest;
  size_t least = std::min(name.size(), std::max<size_t>(2, name.size() / 3) + 1);
  for (const auto& [other, flag] : absl::GetAllFlags()) {
    const size_t distance = Distance(name, std::string(other));
    if (distance < least || (distance == least && std::string(other) < nearest)) {
      nearest = std::string(other);
      least = distance;
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no flag --", name,
                   nearest.empty() ? "" : absl::StrCat("; did you mean --", nearest, "?"),
                   " (--help lists the flags)"));
}

absl::Status SetFlag(absl::CommandLineFlag& flag, const std::string& value) {
  std::string error;
  if (flag.ParseFrom(value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(error);
}

// The text, broken into lines that begin at kColumn but for the first.
std::string Wrap(const std::string& text) {
  std::string result;
  size_t column = kColumn;
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(text, ' '))) {
    if (column > kColumn && column + 1 + word.size() > kWidth) {
      absl::StrAppend(&result, "\n", std::string(kColumn, ' '));
      column = kColumn;
    }
    if (column > kColumn) absl::StrAppend(&result, " ");
    absl::StrAppend(&result, word);
    column += word.size() + 1;
  }
  return result;
}

std::string Describe(const absl::CommandLineFlag& flag) {
  const std::string name = std::string(flag.Name());
  const std::string value = flag.CurrentValue();
  std::string line = flag.IsOfType<bool>() ? absl::StrCat("  --[no]", name)
                                           : absl::StrCat("  --", name, "=", value);
  line += line.size() + 2 > kColumn ? "\n" + std::string(kColumn, ' ')
                                    : std::string(kColumn - line.size(), ' ');
  return absl::StrCat(line, Wrap(flag.Help()), "\n");
}

}  // namespace

absl::Status SetFlags(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.size() < 2 || argument[0] != '-' || argument == "--") {
      return absl::InvalidArgumentError(absl::StrCat(
          "the argument '", argument, "' is no flag (--help lists the flags and an example)"));
    }
    const std::string text = argument.substr(argument[1] == '-' ? 2 : 1);
    const size_t equals = text.find('=');
    const std::string name = text.substr(0, equals);
    absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    std::string value;
    if (flag == nullptr && equals == std::string::npos && absl::StartsWith(name, "no")) {
      flag = absl::FindCommandLineFlag(name.substr(2));
      if (flag != nullptr && !flag->IsOfType<bool>()) flag = nullptr;
      value = "false";
    } else if (flag != nullptr && equals != std::string::npos) {
      value = text.substr(equals + 1);
    } else if (flag != nullptr && flag->IsOfType<bool>()) {
      value = "true";
    } else if (flag != nullptr && i + 1 < argc) {
      value = argv[++i];
    } else if (flag != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " needs a value, as in --", name, "=", flag->CurrentValue()));
    }
    if (flag == nullptr) return UnknownFlag(name);
    if (absl::Status status = SetFlag(*flag, value); !status.ok()) return status;
  }
  return absl::OkStatus();
}

bool WantsHelp(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](const char* argument) {
    const std::string text = argument;
    return text == "--help" || text == "-help" || text == "-h";
  });
}

std::string HelpText(const std::string& program, const Usage& usage) {
  std::map<std::string, std::string> own;
  std::map<std::string, std::string> common;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    const std::string file = absl::StrCat("/", flag->Filename());
    const bool is_own =
        absl::EndsWith(file, "/main.cc") || absl::EndsWith(file, absl::StrCat("/", program, ".cc"));
    (is_own ? own : common)[std::string(name)] = Describe(*flag);
  }
  std::string text =
      absl::StrCat(program, ": ", usage.summary, "\n\nExample:\n  ", usage.example, "\n");
  const std::pair<std::string, std::map<std::string, std::string>> groups[] = {
      {absl::StrCat("Flags of ", program), own}, {"Common flags", common}};
  for (const auto& [title, flags] : groups) {
    if (!flags.empty()) absl::StrAppend(&text, "\n", title, ":\n");
    for (const auto& [name, description] : flags) absl::StrAppend(&text, description);
  }
  return text;
}

}  // namespace lockstep::tutorials
