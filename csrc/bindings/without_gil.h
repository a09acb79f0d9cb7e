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
        // A daemon thread that asks for the GIL while the interpreter goes down is ended by an unwinding that may not
        // pass a destructor: it would abort the process. It sleeps instead, until the process is gone.
#ifdef __GLIBCXX__
        try {
            PyEval_RestoreThread(thread_);
        } catch (abi::__forced_unwind&) {
            for (;;) pause();
        }
#else  // such as LLVM's library, whose threads end without unwinding
        PyEval_RestoreThread(thread_);
#endif
    }

  private:
    PyThreadState* thread_;
    IeeeMode mode_;
};

}  // namespace fedcore::bindings
