#include "lockstep/tools/report/page.h"

#include <map>
#include <ostream>
#include <string_view>

#include "lockstep/tools/trace/file.h"

extern "C" {
extern const char lockstep_page_frame[], lockstep_page_frame_end[];
extern const char lockstep_page_style[], lockstep_page_style_end[];
extern const char lockstep_page_script[], lockstep_page_script_end[];
extern const char lockstep_page_plotly[], lockstep_page_plotly_end[];
}

namespace lockstep::report {
namespace {

std::string_view Text(const char* begin, const char* end) {
  return {begin, static_cast<size_t>(end - begin)};
}

// In a <script>, no "</script>" may occur, and none does without a "<".
std::string ForScript(const nlohmann::json& data) {
  const std::string text = data.dump(/*indent=*/-1, /*indent_char=*/' ', /*ensure_ascii=*/true);
  std::string escaped;
  escaped.reserve(text.size());
  for (char c : text) {
    if (c == '<') {
      escaped += "\\u003c";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

}  // namespace

absl::Status WritePage(const std::string& path, const nlohmann::json& data) {
  const std::string json = ForScript(data);
  const std::map<std::string_view, std::string_view> parts = {
      {"style", Text(lockstep_page_style, lockstep_page_style_end)},
      {"script", Text(lockstep_page_script, lockstep_page_script_end)},
      {"plotly", Text(lockstep_page_plotly, lockstep_page_plotly_end)},
      {"data", json},
  };
  return trace::WriteFileAtomically(path, [&](std::ostream& out) {
    constexpr std::string_view kOpen = "{{";
    constexpr std::string_view kClose = "}}";
    std::string_view rest = Text(lockstep_page_frame, lockstep_page_frame_end);
    for (size_t open = rest.find(kOpen); open != rest.npos; open = rest.find(kOpen)) {
      const size_t close = rest.find(kClose, open);
      out << rest.substr(0, open) << parts.at(rest.substr(open + 2, close - open - 2));
      rest = rest.substr(close + kClose.size());
    }
    out << rest;
  });
}

}  // namespace lockstep::report
