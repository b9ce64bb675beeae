/* A wall clock that can be set while a process runs, for trials: preloaded, it adds an offset in seconds to the time of day.
 *
 * The offset is a long long at the start of a file that is mapped, named by WALL_CLOCK at the start or by wall_clock() later (in a fork).
 * Monotonic clocks stay as they are, as when a host's clock is set. (libfaketime 0.9.10 cannot leave them: sleeps fail with EINVAL.) */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long right = 0;
static volatile long long *offset = &right;

int wall_clock(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    void *map = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED) return -1;
    offset = map;
    return 0;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("WALL_CLOCK");
    if (path) wall_clock(path);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now) *now = at.tv_sec;
    return at.tv_sec;
}
