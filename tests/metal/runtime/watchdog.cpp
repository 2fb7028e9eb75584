// Ends a launch that does not end by itself: a loop whose condition never comes true would otherwise
// hang the test. A timer counts the process's own time; its handler leaves the running fiber for good,
// as every stop does.
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include "runtime.h"

static pthread_t launcher;
static u32 limit;
static struct sigaction before;

static void set_timer(u32 seconds) {
  itimerval t = {{0, 0}, {(time_t)seconds, 0}};
  setitimer(ITIMER_VIRTUAL, &t, nullptr);
}

static void on_time(int, siginfo_t*, void* context) {
  if (!pthread_equal(pthread_self(), launcher)) {  // the kernel chose another of the process's threads
    pthread_kill(launcher, SIGVTALRM);
    return;
  }
  const u64 pc = (u64)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
  const u64 image = (u64)__ehdr_start;
  find(kEndless, pc >= image && pc - image < (64u << 20) ? (void*)(pc + 1) : nullptr, limit);
  stop_run();
}

void watch(u32 seconds) {
  launcher = pthread_self();
  limit = seconds;
  struct sigaction action = {};
  action.sa_sigaction = on_time;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;  // the handler never returns when it stops a run
  sigaction(SIGVTALRM, &action, &before);
  set_timer(seconds);
}

void unwatch() {
  set_timer(0);
  sigaction(SIGVTALRM, &before, nullptr);
}
