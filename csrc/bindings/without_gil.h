// The scope in which a binding runs native code: without the GIL, and in IEEE arithmetic.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include "base/float_mode.h"

namespace fedcore::bindings {

class WithoutGil {
  public:
    WithoutGil() : thread_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        // At interpreter shutdown, a daemon thread that asks for the GIL is ended by an unwinding, which would abort
        // the process in this destructor. The thread sleeps instead, until the process ends.
#ifdef __GLIBCXX__
        try {
            PyEval_RestoreThread(thread_);
        } catch (abi::__forced_unwind&) {
            for (;;) pause();
        }
#else  // for example with LLVM's library, whose threads end without unwinding
        PyEval_RestoreThread(thread_);
#endif
    }

  private:
    PyThreadState* thread_;
    IeeeMode mode_;
};

}  // namespace fedcore::bindings
