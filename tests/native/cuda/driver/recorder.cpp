#include "recorder.h"

namespace fake_cuda {

std::string Recorder::take() {
    std::string text;
    for (const std::string& call : calls_) text += call + "\n";
    calls_.clear();
    return text;
}

int Recorder::failure(const std::string& what) {
    const auto found = failures_.find(what);
    if (found == failures_.end() || found->second.after-- > 0) return 0;
    const int code = found->second.code;
    failures_.erase(found);
    return code;
}

}  // namespace fake_cuda
