// cc -std=c11 -O3
/* The planner's inner loop: from choices to a schedule, its seconds, its peak and its excess.

   The Python twin (`Evaluator` in choices.py) says the same slowly and explains the rules;
   the tests hold the two equal. Nothing is allocated here and nothing is kept between
   calls: all arrays belong to the caller, scratch arrays are left as they were found. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { KEEP = 0 };
enum { FREE = 0, OUTPUT = 1 };

/* What all ops read, make and cost, per op: row i of a list begins at start[i]. */
typedef struct {
    const int32_t *reads_start, *reads;
    const int32_t *writes_start, *writes;
    const int32_t *takes_start, *takes;
    const int64_t *workspace;
    const double *seconds;
} Form;

typedef struct {
    int32_t num_ops, num_buffers, first_backward, num_choices;
    int64_t end_bytes;              /* live after the last op: inputs, resident, outputs */
    double plain_seconds;
    const int64_t *bytes;           /* per buffer */
    const uint8_t *kind;            /* per buffer: OUTPUT or FREE; inputs are never listed */
    const int32_t *producer;        /* per buffer */
    const int32_t *first_choice;    /* per buffer: its first gap, or -1 */
    const int32_t *gap_end;         /* per gap: the next use, far beyond all ops if there is none */
    const int32_t *window;          /* per choice: how many ops ahead the next use may be for a
                                       buffer made again to stay */
    Form plain, again;              /* of an op's first execution, and of its repeats */
    /* scratch */
    uint8_t *is_there;              /* per buffer: the generator may read it */
    uint8_t *is_live;               /* per buffer, all zero between calls */
    int32_t *copies;                /* per buffer, all zero between calls: made by repeats */
    int32_t *gap;                   /* per buffer: the gap it is in */
    int32_t *stamp;                 /* per op, all -1 between generator calls */
    int32_t *cone, *stack;          /* per op */
    uint8_t *old;                   /* the choices that a move replaced */
    int32_t *schedule;              /* capacity entries */
    uint8_t *is_repeat;             /* capacity entries */
    int32_t capacity;
} Program;

typedef struct {
    double seconds;
    double excess;                  /* bytes over the limit, summed over plain ops: each counts
                                       its own highest moment and that of repeats before it */
    int64_t peak;
    int32_t length;                 /* of the schedule; -1 if abandoned */
} Outcome;

/* Step by step, for one schedule. Rows of `lives`: buffer, step of birth, step of last read. */
typedef struct {
    int64_t *curve;                 /* bytes while each step runs */
    int32_t *lives, *last_read;     /* 3 entries per copy that is read; scratch per buffer */
    int32_t num_lives;
} Trace;

static void sort_cone(const Program *p, int32_t op, int32_t count) {
    int32_t *cone = p->cone;
    if (count > 24) { /* wide: read the order off the stamps */
        int32_t low = cone[0], high = cone[0], filled = 0;
        for (int32_t i = 1; i < count; i++) {
            if (cone[i] < low) low = cone[i];
            if (cone[i] > high) high = cone[i];
        }
        for (int32_t j = low; j <= high; j++)
            if (p->stamp[j] == op) cone[filled++] = j;
        return;
    }
    for (int32_t i = 1; i < count; i++) {
        int32_t value = cone[i], k = i;
        for (; k > 0 && cone[k - 1] > value; k--) cone[k] = cone[k - 1];
        cone[k] = value;
    }
}

/* What must be repeated before `op`: the missing buffers' producers, and theirs. */
static int32_t collect_cone(const Program *p, int32_t op) {
    const Form *form = &p->plain;
    int32_t count = 0, depth = 0, reader = op;
    for (;; form = &p->again) {
        for (int32_t r = form->reads_start[reader]; r < form->reads_start[reader + 1]; r++) {
            int32_t buffer = form->reads[r];
            if (p->is_there[buffer]) continue;
            int32_t maker = p->producer[buffer];
            if (p->stamp[maker] == op) continue;
            p->stamp[maker] = op;
            p->cone[count++] = maker;
            p->stack[depth++] = maker;
        }
        if (!depth) break;
        reader = p->stack[--depth];
    }
    if (count > 1) sort_cone(p, op, count);
    return count;
}

/* Fills the schedule; returns its length, or -1 once it costs more than `most_seconds`. */
static int32_t generate(const Program *p, const uint8_t *choices, double most_seconds,
                        double *seconds) {
    const Form *plain = &p->plain, *again = &p->again;
    int32_t length = p->first_backward, result = -1;
    double total = p->plain_seconds;
    for (int32_t b = 0; b < p->num_buffers; b++) {
        int32_t choice = p->first_choice[b];
        p->gap[b] = choice;
        p->is_there[b] = choice < 0 || choices[choice] == KEEP;
    }
    for (int32_t op = p->first_backward; op < p->num_ops; op++) {
        int32_t count = collect_cone(p, op);
        if (length + count >= p->capacity) goto done;
        for (int32_t i = 0; i < count; i++) {
            int32_t j = p->cone[i];
            p->schedule[length] = j;
            p->is_repeat[length++] = 1;
            total += again->seconds[j];
            for (int32_t w = again->writes_start[j]; w < again->writes_start[j + 1]; w++) {
                int32_t buffer = again->writes[w];
                int32_t gap = p->gap[buffer];
                if (gap >= 0 && p->gap_end[gap] - op <= p->window[choices[gap]])
                    p->is_there[buffer] = 1;
            }
        }
        if (total > most_seconds) goto done;
        p->schedule[length] = op;
        p->is_repeat[length++] = 0;
        for (int32_t r = plain->reads_start[op]; r < plain->reads_start[op + 1]; r++) {
            int32_t buffer = plain->reads[r];
            if (p->first_choice[buffer] >= 0)
                p->is_there[buffer] = choices[++p->gap[buffer]] == KEEP;
        }
    }
    result = length;
done:
    for (int32_t op = 0; op < p->num_ops; op++) p->stamp[op] = -1;
    *seconds = total;
    return result;
}

/* Walks the schedule from its end; see replay_schedule. Returns 0 as soon as the energy
   seconds + weight * excess is above `most`, which most moves of a walk are; else 1. */
static int simulate(const Program *p, int32_t length, int64_t limit, Trace *trace, double weight,
                    double most, Outcome *outcome) {
    const Form *again = &p->again;
    int64_t live = p->end_bytes, peak = 0, highest = 0;
    double excess = 0;
    for (int32_t s = p->first_backward; s < length; s++)
        if (p->is_repeat[s]) {
            int32_t j = p->schedule[s];
            for (int32_t w = again->writes_start[j]; w < again->writes_start[j + 1]; w++)
                p->copies[again->writes[w]]++;
        }
    for (int32_t s = length - 1; s >= 0; s--) {
        int32_t op = s < p->first_backward ? s : p->schedule[s];
        int is_repeat = s >= p->first_backward && p->is_repeat[s];
        const Form *form = is_repeat ? again : &p->plain;
        int64_t gone = 0, saved = 0;
        for (int32_t w = form->writes_start[op]; w < form->writes_start[op + 1]; w++) {
            int32_t buffer = form->writes[w];
            int64_t size = p->bytes[buffer];
            gone += size;
            if (is_repeat) p->copies[buffer]--;
            else if (p->kind[buffer] == OUTPUT) continue;
            if (!p->is_live[buffer]) {
                live += size;
            } else if (trace) {
                int32_t *life = trace->lives + 3 * trace->num_lives++;
                life[0] = buffer, life[1] = s, life[2] = trace->last_read[buffer];
            }
            p->is_live[buffer] = 0;
        }
        for (int32_t k = form->takes_start[op]; k < form->takes_start[op + 1]; k++) {
            int32_t buffer = form->takes[k];
            /* What forward handed to backward stays as it is: it may be read a second time. */
            int is_handed = s >= p->first_backward && p->producer[buffer] < p->first_backward;
            int is_own = p->kind[buffer] == FREE && !is_handed;
            if (!p->is_live[buffer] && (is_own || p->copies[buffer])) {
                saved = p->bytes[buffer];
                break;
            }
        }
        for (int32_t r = form->reads_start[op]; r < form->reads_start[op + 1]; r++) {
            int32_t buffer = form->reads[r];
            if (p->is_live[buffer] || (p->kind[buffer] == OUTPUT && !p->copies[buffer])) continue;
            p->is_live[buffer] = 1;
            live += p->bytes[buffer];
            if (trace) trace->last_read[buffer] = s;
        }
        int64_t during = live + form->workspace[op] - saved;
        if (trace) trace->curve[s] = during;
        if (during > peak) peak = during;
        if (!is_repeat) { /* a new group begins, seen from the end */
            if (highest > limit) {
                excess += (double)(highest - limit);
                if (outcome->seconds + weight * excess > most) {
                    memset(p->is_live, 0, (size_t)p->num_buffers * sizeof *p->is_live);
                    memset(p->copies, 0, (size_t)p->num_buffers * sizeof *p->copies);
                    return 0;
                }
            }
            highest = 0;
        }
        if (during > highest) highest = during;
        live -= gone;
    }
    if (highest > limit) excess += (double)(highest - limit);
    outcome->peak = peak;
    outcome->excess = excess;
    outcome->length = length;
    return outcome->seconds + weight * excess <= most;
}

/* trace may be null; its arrays have room for `capacity` steps and three lives per step's write. */
void replay_evaluate(const Program *p, const uint8_t *choices, int64_t limit, Trace *trace,
                     Outcome *outcome) {
    int32_t length = generate(p, choices, 1e300, &outcome->seconds);
    outcome->length = length;
    outcome->peak = INT64_MAX;
    outcome->excess = 1e300;
    if (length >= 0) simulate(p, length, limit, trace, 0, INFINITY, outcome);
}

/* A schedule as it stands, with p->schedule and p->is_repeat filled by the caller. */
void replay_simulate(const Program *p, int32_t length, int64_t limit, Outcome *outcome) {
    double seconds = p->plain_seconds;
    for (int32_t s = p->first_backward; s < length; s++)
        if (p->is_repeat[s]) seconds += p->again.seconds[p->schedule[s]];
    outcome->seconds = seconds;
    simulate(p, length, limit, 0, 0, INFINITY, outcome);
}

/* Moves tried one after the other; move m changes where[starts[m]..starts[m+1]). It stays if the
   energy seconds + weight * excess grows by no more than slack[m]. `best` takes the fastest choices
   within the limit that were met. */
void replay_walk(const Program *p, uint8_t *choices, int64_t limit, double weight,
                 int32_t num_moves, const int32_t *starts, const int32_t *where,
                 const uint8_t *what, const double *slack, uint8_t *best, double *best_seconds,
                 Outcome *current) {
    double energy = current->seconds + weight * current->excess;
    for (int32_t m = 0; m < num_moves; m++) {
        Outcome next;
        double most = energy + slack[m];
        int32_t first = starts[m], last = starts[m + 1], k = first;
        while (k < last && choices[where[k]] == what[k]) k++;
        if (k == last) continue;
        for (k = first; k < last; k++) {
            p->old[k - first] = choices[where[k]];
            choices[where[k]] = what[k];
        }
        int32_t length = generate(p, choices, most, &next.seconds);
        if (length < 0 || !simulate(p, length, limit, 0, weight, most, &next)) {
            for (k = last - 1; k >= first; k--) choices[where[k]] = p->old[k - first];
            continue;
        }
        *current = next;
        energy = next.seconds + weight * next.excess;
        if (next.peak <= limit && next.seconds < *best_seconds) {
            *best_seconds = next.seconds;
            memcpy(best, choices, (size_t)p->num_choices);
        }
    }
}
