/* Teams of CPU threads: every item of a loop is done once, barriers hold, and nobody waits for a slow thread's share. */

enum { TEAM_LOOPS = 300, TEAM_ITEMS = 257 };

static const int team_sizes[] = {1, 2, 3, 8, 33};

struct team_test {
    atomic_int taken[TEAM_LOOPS][TEAM_ITEMS]; /* times that each item was done */
    bool barriers;                            /* one after each loop */
    int reached[64];                          /* rounds of each thread */
    bool late;                                /* the leader waits before its first item, not after it */
    atomic_int wrong, by_leader, by_others;   /* errors; items */
};

static int team_items(int loop) {
    static const int n[] = {0, 1, 2, 3, 7, 64, TEAM_ITEMS};
    return n[loop % (int)(sizeof n / sizeof *n)];
}

static void team_loops(void *arg) {
    struct team_test *t = arg;
    for (int k = 0; k < TEAM_LOOPS; k++) {
        for (int i = team_first(team_items(k)); i >= 0; i = team_next()) t->taken[k][i]++;
        if (t->barriers) team_barrier();
    }
}

/* Begins the numbers of loops again `before` the number 2^24. */
static void team_wind(struct team *t, uint32_t before) {
    for (int i = 0; i < t->n; i++) {
        t->shares[i].loop = (1u << LOOP_BITS) - before;
        t->shares[i].left = share_word(t->shares[i].loop, 0, 0);
    }
}

static void test_team_loops(void) {
    for (size_t s = 0; s < sizeof team_sizes / sizeof *team_sizes; s++) {
        struct team *team = team_start(team_sizes[s], team_sizes[s] > processors());
        for (int round = 0; round < (SANITIZED ? 4 : 40); round++) {
            struct team_test *t = xcalloc(1, sizeof *t);
            t->barriers = round & 1;
            if (team && round == 2) team_wind(team, 100);
            team_run(team, team_loops, t);
            for (int k = 0; k < TEAM_LOOPS; k++)
                for (int i = 0; i < TEAM_ITEMS; i++)
                    CHECK(t->taken[k][i] == (i < team_items(k)),
                          "%d threads: item %d of %d in loop %d was done %d times", team_sizes[s], i, team_items(k), k,
                          t->taken[k][i]);
            free(t);
        }
        team_stop(team);
    }
}

static void team_rounds(void *arg) {
    struct team_test *t = arg;
    const int n = team_me.team->n;
    for (int round = 1; round <= 500; round++) {
        t->reached[team_me.index] = round;
        team_barrier();
        for (int i = 0; i < n; i++) t->wrong += t->reached[i] != round;
        if (team_arrive()) {
            for (int i = 0; i < n; i++) t->reached[i] = -1; /* the others wait */
            team_release();
        }
        for (int i = 0; i < n; i++) t->wrong += t->reached[i] != -1;
        team_barrier();
    }
}

static void test_team_barriers(void) {
    for (int n = 2; n <= 9; n += 7)
        for (int crowded = 0; crowded < 2; crowded++) {
            static struct team_test t;
            struct team *team = team_start(n, crowded);
            for (int k = 0; k < 3; k++) {
                team_run(team, team_rounds, &t);
                usleep(1000); /* so that the threads go to sleep */
            }
            CHECK(t.wrong == 0, "%d threads: a barrier let a thread pass %d times", n, t.wrong);
            team_stop(team);
        }
}

enum { TEAM_LEFT = 16 /* items of 64 that the others may leave to a thread that waits */ };

/* Waits until the others have done their items, and those of the leader's share that they can take. */
static void team_leader_waits(const struct team_test *t) {
    for (const double end = now_seconds() + 60; t->by_others <= 64 - TEAM_LEFT && now_seconds() < end;) usleep(1000);
}

static void team_slow(void *arg) {
    struct team_test *t = arg;
    if (team_leads() && t->late) team_leader_waits(t);
    for (int i = team_first(64); i >= 0; i = team_next()) {
        t->taken[0][i]++;
        if (team_leads()) t->by_leader++;
        else t->by_others++;
        if (team_leads() && !t->late) team_leader_waits(t);
    }
}

static void test_team_slow(void) {
    for (int late = 0; late < 2; late++) {
        struct team_test *t = xcalloc(1, sizeof *t);
        struct team *team = team_start(2, false);
        t->late = late;
        team_run(team, team_slow, t);
        CHECK(t->by_leader < TEAM_LEFT, "a slow thread was left with %d of 64 items", t->by_leader);
        for (int i = 0; i < 64; i++) CHECK(t->taken[0][i] == 1, "item %d was done %d times", i, t->taken[0][i]);
        team_stop(team);
        free(t);
    }
}

/* A thread outside team_run is alone, whatever teams there are. */
static void test_team_alone(void) {
    struct team *team = team_start(3, true);
    struct team_test *t = xcalloc(1, sizeof *t);
    t->barriers = true;
    team_loops(t);
    for (int i = 0; i < TEAM_ITEMS; i++) CHECK(t->taken[6][i] == 1, "item %d was done %d times", i, t->taken[6][i]);
    free(t);
    team_stop(team);
}

#define TESTS_TEAM                                                                                         \
    {"team/loops", test_team_loops}, {"team/barriers", test_team_barriers}, {"team/slow", test_team_slow}, \
        {"team/alone", test_team_alone},
