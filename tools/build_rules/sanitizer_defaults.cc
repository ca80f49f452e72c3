// Part of every test: the thread sanitizer's runtime looks for a function of this name.
extern "C" __attribute__((no_sanitize("thread"))) const char* __tsan_default_suppressions() {
  // The reference counts of absl::Status are in Abseil's library, where the sanitizer does not see
  // them: the free by the last owner looks like a race with another's last read. The address
  // sanitizer finds those that are none of Abseil's doing.
  return "race:^operator delete\n";
}
