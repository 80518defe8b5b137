// Fibers: stacks that take turns. A switch saves what a function call must preserve, and nothing else.
#pragma once
#include <cstddef>
#include <cstdint>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace simulator {

typedef void (*Body)();

#if defined(__x86_64__)
extern "C" void simulator_switch(void** save, void* load);
asm(R"(
.text
.hidden simulator_switch
.globl simulator_switch
simulator_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
struct Context {
    void* at = nullptr;
    void start(char* stack, size_t size, Body body) {
        void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + size) & ~uintptr_t(15));
        *--top = nullptr;  // what body would return to; it never does
        *--top = reinterpret_cast<void*>(body);
        at = top - 6;
    }
};
inline void change(Context& from, Context& to) { simulator_switch(&from.at, to.at); }

#elif defined(__aarch64__)
extern "C" void simulator_switch(void** save, void* load);
asm(R"(
.text
.hidden simulator_switch
.globl simulator_switch
simulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0];   stp x21, x22, [sp, #16];  stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48];  stp x27, x28, [sp, #64];  stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96];    stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0];   ldp x21, x22, [sp, #16];  ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48];  ldp x27, x28, [sp, #64];  ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96];    ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
struct Context {
    void* at = nullptr;
    void start(char* stack, size_t size, Body body) {
        void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + size) & ~uintptr_t(15)) - 20;
        top[11] = reinterpret_cast<void*>(body);  // x30, where `ret` goes
        at = top;
    }
};
inline void change(Context& from, Context& to) { simulator_switch(&from.at, to.at); }

#else
struct Context {
    ucontext_t at;
    void start(char* stack, size_t size, Body body) {
        getcontext(&at);
        at.uc_stack.ss_sp = stack;
        at.uc_stack.ss_size = size;
        at.uc_link = nullptr;
        makecontext(&at, body, 0);
    }
};
inline void change(Context& from, Context& to) { swapcontext(&from.at, &to.at); }
#endif

}  // namespace simulator
