// The scope in which a binding runs native code: without the GIL, and in IEEE arithmetic; and the scope in which this
// code calls Python.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include "base/float_mode.h"

namespace fedcore::bindings {

// Calls a function that asks for the GIL. At interpreter shutdown, a daemon thread that asks for it is ended by an
// unwinding, which would abort the process in a destructor. The thread sleeps instead, until the process ends.
template <class Ask>
auto asking_for_gil(const Ask& ask) {
#ifdef __GLIBCXX__
    try {
        return ask();
    } catch (abi::__forced_unwind&) {
        for (;;) pause();
    }
#else  // for example with LLVM's library, whose threads end without unwinding
    return ask();
#endif
}

class WithGil {
  public:
    WithGil() : state_(asking_for_gil([] { return PyGILState_Ensure(); })) {}
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;
    ~WithGil() { PyGILState_Release(state_); }

  private:
    PyGILState_STATE state_;
};

class WithoutGil {
  public:
    WithoutGil() : thread_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        asking_for_gil([this] { PyEval_RestoreThread(thread_); });
    }

  private:
    PyThreadState* thread_;
    IeeeMode mode_;
};

}  // namespace fedcore::bindings
