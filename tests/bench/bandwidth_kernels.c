/* The reference for measure_bandwidth: plain C kernels over memory, with all cores.
 *
 * usage: bandwidth_kernels SECONDS BYTES   (BYTES: both arrays together)
 * prints one line: the best GB/s of a single pass of each of
 *   sum     one stream:   s += a[i]
 *   dot     two streams:  s += a[i] * b[i]
 *   four    four streams, at four places of an array
 *   copy    b[i] = a[i], as in STREAM: bytes read plus bytes written
 * Kernels take turns until the time is over, so that a disturbance falls on all of them.
 */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

enum { SUM, DOT, FOUR, COPY, KERNELS };

static volatile double sink; /* a result that nobody reads is a loop that nobody runs */

static double pass(int kernel, double *a, double *b, long n) {
    double s = 0, s1 = 0, s2 = 0, s3 = 0, begun = omp_get_wtime(), bytes = 8.0 * n;
    long quarter = n / 4;
    switch (kernel) {
    case SUM:
#pragma omp parallel for reduction(+ : s)
        for (long i = 0; i < n; i++) s += a[i];
        break;
    case DOT:
#pragma omp parallel for reduction(+ : s)
        for (long i = 0; i < n; i++) s += a[i] * b[i];
        bytes *= 2;
        break;
    case FOUR:
#pragma omp parallel for reduction(+ : s, s1, s2, s3)
        for (long i = 0; i < quarter; i++) {
            s += a[i];
            s1 += a[i + quarter];
            s2 += a[i + 2 * quarter];
            s3 += a[i + 3 * quarter];
        }
        break;
    case COPY:
#pragma omp parallel for
        for (long i = 0; i < n; i++) b[i] = a[i];
        bytes *= 2;
        break;
    }
    sink = s + s1 + s2 + s3;
    return bytes * 1e-9 / (omp_get_wtime() - begun);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    double seconds = atof(argv[1]), best[KERNELS] = {0};
    long n = atol(argv[2]) / 16;
    double *a = aligned_alloc(4096, n * 8), *b = aligned_alloc(4096, n * 8);
    if (!a || !b) return 1;
#pragma omp parallel for /* pages lie where they are first touched */
    for (long i = 0; i < n; i++) {
        a[i] = i & 7;
        b[i] = i & 3;
    }
    double begun = omp_get_wtime();
    do {
        for (int kernel = 0; kernel < KERNELS; kernel++) {
            double rate = pass(kernel, a, b, n);
            if (rate > best[kernel]) best[kernel] = rate;
        }
    } while (omp_get_wtime() - begun < seconds);
    printf("%.3f %.3f %.3f %.3f\n", best[SUM], best[DOT], best[FOUR], best[COPY]);
    return 0;
}
