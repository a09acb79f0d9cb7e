// Where a fiber stands, and how the processor goes from one to another. For cuda_on_host.cpp alone, whose sanitizers it
// shares.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstddef>

namespace cuda_on_host {

// kKept: a fiber that has come to its end begins again when it is changed to, for the next block.
#if defined(__SANITIZE_ADDRESS__) || defined(FEDCORE_TSAN)
// What the sanitizers know of.
constexpr bool kKept = false;
using Context = ucontext_t;

inline void change(Context& from, Context& to) {
    swapcontext(&from, &to);
}
// The first change to this context calls entry(), on a stack of so many bytes.
inline void begin(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#elif !defined(__x86_64__)
// swapcontext asks the kernel for the signals' mask, which takes ten times as long as the rest: a fiber is begun so
// once, and jumped to from then on.
constexpr bool kKept = true;
struct Context {
    ucontext_t begins;
    std::jmp_buf goes_on;
    bool begun;
};

inline void change(Context& from, Context& to) {
    from.begun = true;
    if (_setjmp(from.goes_on) != 0) return;
    if (to.begun) _longjmp(to.goes_on, 1);
    setcontext(&to.begins);
}
inline void begin(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context.begins);
    context.begins.uc_stack.ss_sp = stack;
    context.begins.uc_stack.ss_size = bytes;
    context.begins.uc_link = nullptr;
    makecontext(&context.begins, entry, 0);
}
#else
// A context is the stack's pointer, below it the registers that a function leaves as they were: a third of the time of
// setjmp and longjmp.
constexpr bool kKept = true;
using Context = void**;

extern "C" void cuda_on_host_change(Context* from, Context to);
asm(R"(
.text
.hidden cuda_on_host_change
.globl cuda_on_host_change
.type cuda_on_host_change, @function
cuda_on_host_change:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cuda_on_host_change, . - cuda_on_host_change
)");

inline void change(Context& from, Context& to) {
    cuda_on_host_change(&from, to);
}
inline void begin(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
    auto* const top = reinterpret_cast<void**>(stack + bytes);
    top[-1] = nullptr;  // entry() never returns
    top[-2] = reinterpret_cast<void*>(entry);
    context = top - 8;
}
#endif

}  // namespace cuda_on_host
