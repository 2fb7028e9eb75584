// What ends a launch from outside: its time is over, or the processor refuses an instruction.
//
// A loop whose condition never comes true would hang the test; a misaligned access that no check of
// clang's stands before (one component of a vector in memory) would end the process. The handlers
// leave the running fiber for good, as every stop does.
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include "runtime.h"

static pthread_t launcher;
static u32 limit;
static u8 handler_stack[64 << 10];
static stack_t stack_before;
constexpr int kSignals[] = {SIGVTALRM, SIGSEGV, SIGBUS, SIGFPE};
static struct sigaction before[sizeof kSignals / sizeof kSignals[0]];

static void set_timer(u32 seconds) {
  itimerval t = {{0, 0}, {(time_t)seconds, 0}};
  setitimer(ITIMER_VIRTUAL, &t, nullptr);
}

static void on_signal(int signal, siginfo_t* info, void* context) {
  if (!pthread_equal(pthread_self(), launcher)) {
    if (signal == SIGVTALRM) {  // the kernel chose another of the process's threads
      pthread_kill(launcher, signal);
      return;
    }
    unwatch();  // another thread's fault is not ours: it happens again, with the old handler
    return;
  }
  const u64 pc = (u64)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
  const u64 image = (u64)__ehdr_start;
  const void* at = pc >= image && pc - image < (64u << 20) ? (void*)(pc + 1) : nullptr;
  if (signal == SIGVTALRM) {
    find(kEndless, at, limit);
  } else if (signal == SIGFPE) {
    find(kDivideByZero, at);
  } else if (info->si_code > 0 && info->si_code != SI_KERNEL) {
    find(kWild, at).offset = (int64_t)info->si_addr;
  } else {
    find(kMisaligned, at, 16);  // aligned moves of 16 bytes fault without an address
  }
  stop_run();
}

void watch(u32 seconds) {
  launcher = pthread_self();
  limit = seconds;
  const stack_t stack = {handler_stack, 0, sizeof handler_stack};
  sigaltstack(&stack, &stack_before);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;  // a handler that stops a run never returns
  for (u32 i = 0; i < sizeof kSignals / sizeof kSignals[0]; ++i)
    sigaction(kSignals[i], &action, &before[i]);
  set_timer(seconds);
}

void unwatch() {
  set_timer(0);
  for (u32 i = 0; i < sizeof kSignals / sizeof kSignals[0]; ++i)
    sigaction(kSignals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
}
