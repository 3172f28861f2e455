// cc -std=c11 -O2 -pthread -Wall -Wextra
/* Heartbeats of a thread that needs no interpreter, whose lock C code may hold for a minute.
 *
 * A process that is stopped still acknowledges what it is sent: that is the kernel. This thread is
 * stopped with it, and lives as long as the process does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { NONE = -1 };

typedef struct {
    _Atomic int is_over;
    int num_lines, milliseconds;
    _Atomic int lines[]; /* duplicates, so that no number is anybody else's */
} Pulse;

void pulse_forget(Pulse *pulse)
{
    for (int at = 0; at < pulse->num_lines; at++) {
        int line = atomic_exchange(&pulse->lines[at], NONE);
        if (line != NONE)
            close(line);
    }
}

static void *beat(void *given)
{
    Pulse *pulse = given;
    const struct timespec pause = {pulse->milliseconds / 1000,
                                   pulse->milliseconds % 1000 * 1000000L};
    while (!pulse->is_over) {
        for (int at = 0; at < pulse->num_lines; at++) {
            int line = pulse->lines[at];
            if (line == NONE || send(line, ".", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1)
                continue;
            if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) { /* it never comes back */
                pulse->lines[at] = NONE;
                close(line);
            }
        }
        nanosleep(&pause, NULL);
    }
    pulse_forget(pulse);
    free(pulse);
    return NULL;
}

/* Begin to beat, on no line yet; NULL where that is not to be had. */
Pulse *pulse_open(int num_lines, int milliseconds)
{
    Pulse *pulse = malloc(sizeof *pulse + num_lines * sizeof *pulse->lines);
    if (!pulse)
        return NULL;
    pulse->is_over = 0;
    pulse->num_lines = num_lines;
    pulse->milliseconds = milliseconds;
    for (int at = 0; at < num_lines; at++)
        pulse->lines[at] = NONE;
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of Python */
    int is_refused = pthread_create(&thread, NULL, beat, pulse);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_refused) {
        free(pulse);
        return NULL;
    }
    pthread_detach(thread);
    return pulse;
}

/* Beat on a connection, too; one that finds no place is left out. Called by one thread at a time. */
void pulse_add(Pulse *pulse, int line)
{
    for (int at = 0; at < pulse->num_lines; at++)
        if (pulse->lines[at] == NONE) {
            pulse->lines[at] = fcntl(line, F_DUPFD_CLOEXEC, 0);
            return;
        }
}

/* Let the thread end, which frees the pulse. */
void pulse_close(Pulse *pulse) { pulse->is_over = 1; }
