// What the driver was asked, and which calls are to fail.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace fake_cuda {

class Recorder {
  public:
    void note(const std::string& call) { calls_.push_back(call); }
    // More of the call that was noted last.
    void add(const std::string& detail) { calls_.back() += " " + detail; }
    // The calls since the last time, a line each.
    std::string take();

    // `what` fails with a code behind so many calls that go well; once.
    void fail(const std::string& what, int code, int after) { failures_[what] = {code, after}; }
    // The code with which `what` is to fail now, or 0.
    int failure(const std::string& what);
    void forget_failures() { failures_.clear(); }

  private:
    struct Failure {
        int code, after;
    };
    std::vector<std::string> calls_;
    std::map<std::string, Failure> failures_;
};

}  // namespace fake_cuda
