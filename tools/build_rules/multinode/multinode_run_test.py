#!/usr/bin/env python3
"""What multinode_run starts, where, and how it judges the end; with stand-ins for Slurm and mpirun."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import unittest

HERE = "tools/build_rules/multinode"
sys.path.insert(0, os.path.abspath(HERE))

from test_fakes import Fakes  # noqa: E402

SLURM = ("srun", "sbatch", "salloc", "scontrol", "scancel")
ALLOCATION = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}


class Done:
    def __init__(self, process):
        self.out, self.err = process.communicate(timeout=60)
        self.status = process.returncode

    def ranks(self):
        """What the ranks printed, by rank."""
        lines = [json.loads(line) for line in self.out.split("\n") if line.startswith("{")]
        return sorted(lines, key=lambda line: line["rank"])


class MultinodeRunTest(unittest.TestCase):
    def make(self, *names):
        self.fakes = Fakes(names)
        self.addCleanup(self.fakes.remove)
        return self.fakes

    def start(self, *words, target="test_run", **environment):
        return subprocess.Popen([os.path.abspath(os.path.join(HERE, target)), *words], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, cwd=self.fakes.home,
                                env=self.fakes.environment(RUNFILES_DIR=os.environ["TEST_SRCDIR"], **environment))

    def run_it(self, *words, **options):
        return Done(self.start(*words, **options))

    def site(self, text):
        path = os.path.join(self.fakes.home, "site.conf")
        with open(path, "w") as f:
            f.write(text)
        return "--site=" + path

    def check_nothing_left(self):
        self.assertEqual(os.listdir(os.path.join(self.fakes.stage, "runs")), [])

    # --- where ------------------------------------------------------------------------------

    def test_without_slurm_it_runs_here(self):
        self.make("mpirun")
        done = self.run_it("--epochs=3")
        self.assertEqual(done.status, 0, done.err)
        self.assertEqual([rank["args"] for rank in done.ranks()], [["--of=rule", "--epochs=3"]] * 4)
        self.assertEqual(done.err, "multinode_run: there is no Slurm here: 4 ranks on this host, by mpirun, in the place of "
                         "2 nodes with 2 ranks each\n")
        self.assertFalse(os.path.exists(self.fakes.stage))

    def test_without_mpirun_it_says_so(self):
        self.make()
        done = self.run_it()
        self.assertEqual((done.status, done.out), (2, ""))
        self.assertIn("there is no mpirun on PATH: load the module of Open MPI", done.err)

    def test_outside_an_allocation_it_asks_for_one(self):
        self.make(*SLURM)
        done = self.run_it(self.site("[slurm]\naccount = m1\nconstraint = gpu&hbm80g\n"), target="test_run_gpus")
        self.assertEqual((done.status, done.out), (2, ""))
        self.assertEqual(done.err, "multinode_run: this is no allocation of Slurm: add --submit, or --local for a run on this "
                         "host, or get one:\n"
                         "  salloc \\\n    --nodes=2 \\\n    --ntasks-per-node=4 \\\n    --cpus-per-task=32 \\\n"
                         "    --gpus-per-node=4 \\\n    --account=m1 \\\n    '--constraint=gpu&hbm80g' \\\n    --time=00:30:00\n")

    def test_in_an_allocation_by_srun(self):
        self.make(*SLURM)
        done = self.run_it("x", FAKE_MPI_KINDS="none pmix pmix_v4 pmi2", **ALLOCATION)
        self.assertEqual(done.status, 0, done.err)
        self.assertEqual(len(done.ranks()), 4)
        call = self.fakes.calls("srun")[1]
        self.assertEqual(call["words"][:7], ["--kill-on-bad-exit=1", "--mpi=pmix", "--input=none", "--nodes=2", "--ntasks=4",
                                             "--ntasks-per-node=2", call["words"][6]])
        self.assertTrue(call["words"][6].startswith(self.fakes.stage + "/test_run."), call["words"])
        self.assertEqual(call["env"]["SLURM_PMIX_FENCE"], "ring")
        self.assertEqual(call["cwd"], self.fakes.home)
        self.check_nothing_left()

    def test_bazel_run_starts_where_the_user_is(self):
        self.make("mpirun")
        folder = os.path.join(self.fakes.home, "a folder")
        os.mkdir(folder)
        with open(folder + "/my.conf", "w") as f:
            f.write("[environment]\nOF_SITE = mine\n")
        done = self.run_it("--site=my.conf", "--log_dir=logs", BUILD_WORKING_DIRECTORY=folder)
        self.assertEqual({rank["cwd"] for rank in done.ranks()}, {folder}, done.err)
        self.assertEqual({rank["env"]["OF_SITE"] for rank in done.ranks()}, {"mine"})
        self.assertEqual(len(os.listdir(folder + "/logs")), 8)

    def test_the_mpi_kind(self):
        self.make(*SLURM, "mpirun")
        for kinds, words, expected in (("none pmix_v3 pmix_v4", [], "--mpi=pmix_v4"), ("none pmi2", [], "mpirun"),
                                       ("none pmi2", ["--launcher=srun"], "--mpi=none"),
                                       ("none pmix", ["--launcher=mpirun"], "mpirun"),
                                       ("none pmix", [self.site("[launch]\nmpi = cray_shasta\n")], "--mpi=cray_shasta"),
                                       ("none pmix", [self.site("[launch]\nlauncher = mpirun\n")], "mpirun")):
            if words and words[0].startswith("--site"):
                self.site({"--mpi=cray_shasta": "[launch]\nmpi = cray_shasta\n"}.get(expected, "[launch]\nlauncher = mpirun\n"))
            done = self.run_it(*words, FAKE_MPI_KINDS=kinds, **ALLOCATION)
            self.assertEqual(done.status, 0, done.err)
            runs = [call["words"][1] for call in self.fakes.calls("srun") if call["words"] != ["--mpi=list"]]
            self.assertEqual(runs or ["mpirun"], [expected], kinds)
            self.assertEqual(len(self.fakes.calls("mpirun")), expected == "mpirun")

    def test_mpirun_in_an_allocation_and_over_ssh(self):
        self.make(*SLURM, "mpirun")
        self.run_it("--launcher=mpirun", "--cpus_per_rank=8", **ALLOCATION)
        words = self.fakes.calls("mpirun")[0]["words"]
        self.assertEqual(words[:6], ["-n", "4", "--map-by", "ppr:2:node:PE=8", "--bind-to", "core"])
        self.assertIn("LOCKSTEP_RUN", words)
        done = self.run_it("--hosts=a,b,c.d")
        self.assertEqual(len(done.ranks()), 6, done.err)
        words = self.fakes.calls("mpirun")[0]["words"]
        self.assertEqual(words[:8], ["-n", "6", "--host", "a:2,b:2,c.d:2", "--map-by", "ppr:2:node", "--bind-to", "none"])
        self.assertTrue(words[-2].startswith(self.fakes.stage), words)
        self.assertEqual({words[i + 1] for i, word in enumerate(words) if word == "-x"} & {"RUNFILES_DIR", "LOCKSTEP_RUN",
                                                                                       "LOCKSTEP_RESTARTS"},
                         {"RUNFILES_DIR", "LOCKSTEP_RUN", "LOCKSTEP_RESTARTS"})

    def test_refuses_what_srun_would_wait_for(self):
        self.make(*SLURM)
        done = self.run_it(**dict(ALLOCATION, SLURM_JOB_NUM_NODES="1"))
        self.assertEqual((done.status, done.err), (2, "multinode_run: this allocation has 1 node, and 2 are wanted (--nodes); "
                                                   "this is enough: salloc --nodes=2 --ntasks-per-node=2\n"))
        done = self.run_it("--cpus_per_rank=3", **dict(ALLOCATION, SLURM_JOB_CPUS_PER_NODE="64(x7),5"))
        self.assertEqual(done.status, 2)
        self.assertIn("has 5 CPUs on a node, and 6 are wanted", done.err)

    # --- staging ----------------------------------------------------------------------------

    def test_stages_once_and_needs_nothing_else(self):
        self.make(*SLURM)
        for _ in range(2):
            self.assertEqual(self.run_it(FAKE_MPI_KINDS="pmix", **ALLOCATION).status, 0)
        copies = [name for name in os.listdir(self.fakes.stage) if name != "runs"]
        self.assertEqual(len(copies), 1)
        copy = os.path.join(self.fakes.stage, copies[0])
        files = sorted(os.path.relpath(os.path.join(folder, name), copy) for folder, _, names in os.walk(copy) for name in names)
        self.assertEqual(files, ["lockstep/%s/%s" % (HERE, name)
                                 for name in ("job.sh", "rank.sh", "test_program", "test_program.py")])
        self.assertFalse(any(os.path.islink(os.path.join(copy, name)) for name in files))

        old = os.path.join(self.fakes.stage, "test_run.0123456789ab")
        other = os.path.join(self.fakes.stage, "other_run.0123456789ab")
        for folder in (old, other):
            os.makedirs(folder)
            os.utime(folder, (0, time.time() - 31 * 24 * 3600))
        self.run_it(FAKE_MPI_KINDS="pmix", **ALLOCATION)
        self.assertEqual([os.path.exists(folder) for folder in (old, other, copy)], [False, True, True])

    def test_says_where_it_cannot_stage(self):
        self.make(*SLURM)
        done = self.run_it(self.site("[stage]\ndirectory = /proc/nowhere\n"), FAKE_MPI_KINDS="pmix", **ALLOCATION)
        self.assertEqual((done.status, done.out), (2, ""))
        self.assertIn("cannot stage to /proc/nowhere: ", done.err)
        self.assertIn("name another directory that all nodes see: [stage] directory", done.err)

    # --- how it ends ------------------------------------------------------------------------

    def end(self, *words, **environment):
        done = self.run_it(*words, FAKE_MPI_KINDS="pmix", **dict(ALLOCATION, **environment))
        self.check_nothing_left()
        return done.status, "\n".join(done.err.strip().split("\n")[1:]).replace(os.uname().nodename, "HOST")

    def test_success_is_what_the_ranks_say(self):
        self.make(*SLURM)
        self.assertEqual(self.end(), (0, ""))
        self.assertEqual(self.end(FAKE_STATUS="9"), (0, "multinode_run: all ranks ended well, though srun says 9"))
        # srun returns 0 after a node was killed.
        self.assertEqual(self.end(FAKE_SKIP_RANKS="2,3", FAKE_STATUS="0"),
                         (1, "multinode_run: never heard how ranks 2 3 ended: killed, or the node lost (srun says 0)"))
        status, text = self.end(FAKE_SKIP_RANKS="0,1,2,3", FAKE_STATUS="0")
        self.assertEqual(status, 1)
        self.assertIn("no rank started; do all nodes see %s/runs? ([stage] directory in the site file)" % self.fakes.stage, text)

    def test_the_first_to_fail_gives_the_status(self):
        self.make(*SLURM)
        self.assertEqual(self.end("--do=three_on_1"), (3, "multinode_run: rank 1 on HOST ended with status 3"))
        self.assertEqual(self.end("--do=three_on_1", FAKE_STATUS="0"), (3, "multinode_run: rank 1 on HOST ended with status 3"))
        self.assertEqual(self.end("--do=abort_on_1")[0], 134)
        self.assertIn("rank 1 on HOST ended with status 134 (SIGABRT)", self.end("--do=abort_on_1")[1])

    def test_restarts(self):
        self.make(*SLURM)
        self.assertEqual(self.end("--do=two_restarts", "--max_restarts=2"),
                         (0, "multinode_run: saved and stopped: restart 1 of 2\n"
                          "multinode_run: saved and stopped: restart 2 of 2"))
        self.assertEqual(self.end("--do=two_restarts", "--max_restarts=1"),
                         (75, "multinode_run: saved and stopped: restart 1 of 1\n"
                          "multinode_run: saved and stopped, to be started again (status 75); --max_restarts=1 is used up"))
        self.assertEqual(self.end("--do=two_restarts"),
                         (75, "multinode_run: saved and stopped, to be started again (status 75)"))
        self.assertEqual(self.end("--do=three_on_1", "--max_restarts=2")[0], 3)

    def test_a_signal_lets_ranks_save(self):
        self.make("mpirun")
        for what, saved in (("wait_to_save", 4), ("wait", 0)):
            process = self.start("--do=" + what)
            for _ in range(8):
                process.stdout.readline()
            process.send_signal(signal.SIGINT)
            done = Done(process)
            self.assertEqual((done.status, done.out.count("saved")), (130, saved), done.err)
            self.assertIn("the ranks were told to stop", done.err)
            self.assertEqual("start it again to go on" in done.err, saved > 0)

    # --- batch jobs -------------------------------------------------------------------------

    def test_submits_and_follows(self):
        self.make(*SLURM)
        done = self.run_it("--submit", FAKE_MPI_KINDS="pmix", FAKE_JOB_STATES="PENDING,RUNNING,COMPLETED")
        self.assertEqual((done.status, done.out), (0, "the output\n"), done.err)
        self.assertIn("multinode_run: job 17 waits: Resources\n", done.err)
        self.assertEqual(self.fakes.calls("scancel"), [])
        for state, status, text in (("FAILED:3:0", 3, "job 17: FAILED"), ("TIMEOUT:0:15", 143, "job 17: TIMEOUT, TimeLimit"),
                                    ("NODE_FAIL:0:0", 1, "job 17: NODE_FAIL"), ("CANCELLED:0:0", 1, "job 17: CANCELLED"),
                                    ("error slurm_load_jobs error: Invalid job id specified", 2, "does not tell how job 17 ended")):
            if os.path.exists(self.fakes.folder + "/states"):
                os.remove(self.fakes.folder + "/states")
            done = self.run_it("--submit", FAKE_MPI_KINDS="pmix", FAKE_JOB_STATES=state)
            self.assertEqual(done.status, status, done.err)
            self.assertIn(text, done.err)

    def test_detaches(self):
        self.make(*SLURM)
        done = self.run_it("--detach", FAKE_MPI_KINDS="pmix")
        self.assertEqual((done.status, done.out), (0, "17\n"), done.err)
        self.assertIn("to end it: scancel 17", done.err)
        self.assertEqual(self.fakes.calls("scontrol"), [])

    def test_cancels_when_interrupted(self):
        self.make(*SLURM)
        for number in (signal.SIGINT, signal.SIGTERM):
            if os.path.exists(self.fakes.folder + "/states"):
                os.remove(self.fakes.folder + "/states")
            process = self.start("--submit", FAKE_MPI_KINDS="pmix", FAKE_JOB_STATES="RUNNING,RUNNING,CANCELLED")
            process.stdout.readline()
            process.send_signal(number)
            done = Done(process)
            self.assertEqual(done.status, 128 + number, done.err)
            self.assertEqual([call["words"] for call in self.fakes.calls("scancel")], [["17"]])
            self.assertIn("job 17 is cancelled", done.err)

    def test_says_why_a_job_is_refused(self):
        self.make(*SLURM)
        done = self.run_it("--submit", FAKE_MPI_KINDS="pmix", FAKE_REFUSAL="sbatch: error: invalid account")
        self.assertEqual((done.status, done.out), (2, ""))
        self.assertTrue(done.err.endswith("multinode_run: sbatch refused the job: sbatch: error: invalid account\n"), done.err)
        self.make("mpirun")
        self.assertIn("there is no sbatch on PATH", self.run_it("--submit").err)

    # --- command line and site file ---------------------------------------------------------

    def test_says_what_is_wrong(self):
        self.make("mpirun")
        for words, message in ((["--nodes=0"], "--nodes=0: give a whole number from 1 up"),
                               (["--ranks_per_node", "x"], "--ranks_per_node=x: give a whole number from 1 up"),
                               (["--max_restarts"], "--max_restarts needs a value"), (["--local=1"], "--local takes no value"),
                               (["--launcher=ssh"], "--launcher=ssh: choose auto, srun or mpirun"),
                               (["--time=1h"], "--time=1h: give minutes, hours:minutes:seconds or "
                                "days-hours:minutes:seconds"),
                               (["--hosts=a,,b"], "--hosts=a,,b: give names of hosts, as in --hosts=a,b"),
                               (["--log_ranks=x"], "--log_ranks=x: give ranks, as in --log_ranks=0,1, or all"),
                               (["--submit", "--local"], "--submit and --local exclude each other"),
                               (["--site=/nowhere"], "/nowhere: No such file or directory")):
            done = self.run_it(*words)
            self.assertEqual((done.status, done.out, done.err), (2, "", "multinode_run: %s\n" % message))
        for text, message in (("[slurm]\nacount = x\n", "[slurm] has no setting acount; it has account, qos, partition, "
                               "constraint, options"), ("[slrum]\n", "there is no section [slrum]; there are [slurm], [launch], "
                                                        "[network], [modules], [stage], [environment]"),
                              ("[environment]\nA-B = 1\n", "[environment] A-B: that is no name of a variable"),
                              ("[slurm]\noptions = 'x\n", "[slurm] options: No closing quotation"),
                              ("[launch]\nlauncher = ssh\n", "[launch] launcher = ssh: choose auto, srun or mpirun")):
            flag = self.site(text)
            done = self.run_it(flag)
            self.assertEqual((done.status, done.err), (2, "multinode_run: %s: %s\n" % (flag[7:], message)))
        self.assertIn("File contains no section headers", self.run_it(self.site("account = x\n")).err)

    def test_reads_the_users_site_file(self):
        self.make("mpirun")
        folder = os.path.join(self.fakes.home, ".config/lockstep")
        os.makedirs(folder)
        with open(os.path.join(folder, "site.conf"), "w") as f:
            f.write("[environment]\nOF_SITE = it's \"here\" = $HOME\n")
        done = self.run_it()
        self.assertEqual(done.ranks()[0]["env"]["OF_SITE"], "it's \"here\" = $HOME", done.err)

    def test_flags_end_at_two_dashes(self):
        self.make("mpirun")
        done = self.run_it("--ranks_per_node", "1", "-x", "--", "--nodes=7", "--", "--help")
        self.assertEqual([rank["args"] for rank in done.ranks()], [["--of=rule", "-x", "--nodes=7", "--", "--help"]] * 2)

    def test_logs_of_ranks(self):
        self.make("mpirun")
        done = self.run_it("--log_ranks=0,3", "--log_dir=logs", "--do=stderr")
        self.assertEqual(sorted(line[:4] for line in done.out.strip().split("\n")), ["[0] ", "[3] "])
        self.assertEqual(sorted(line for line in done.err.split("\n") if line.startswith("[")),
                         ["[%d] to stderr" % rank for rank in range(4)])
        for rank in range(4):
            with open("%s/logs/rank%d.out" % (self.fakes.home, rank)) as f:
                self.assertEqual(json.loads(f.read())["rank"], rank)
            with open("%s/logs/rank%d.err" % (self.fakes.home, rank)) as f:
                self.assertEqual(f.read(), "to stderr\n")
        self.assertEqual(self.run_it("--log_ranks=all", "--do=three_on_1").status, 3)

    # --- quoting and dry runs ---------------------------------------------------------------

    def test_arguments_arrive_as_they_are(self):
        self.make("mpirun", *SLURM)
        seed = int(os.environ.get("LOCKSTEP_SEED", random.randrange(10**9)))
        print("LOCKSTEP_SEED=%d" % seed, file=sys.stderr)
        rng = random.Random(seed)
        letters = "ab \t\n'\"\\$`!*?~#&|;<>(){}[]=%-é"
        for _ in range(100 if os.environ.get("LOCKSTEP_SOAK") else 10):
            words = ["".join(rng.choice(letters) for _ in range(rng.randrange(12))) for _ in range(rng.randrange(9))]
            value = "".join(rng.choice(letters.replace("\n", "")) for _ in range(9)).strip() or "x"
            site = self.site("[environment]\nOF_SITE = %s\n" % value)
            for form in (["--local"], []):
                done = self.run_it("--nodes=1", "--ranks_per_node=1", site, *form, "--", *words, FAKE_MPI_KINDS="pmix",
                                   **(ALLOCATION if not form else {}))
                self.assertEqual(done.ranks()[0]["args"], ["--of=rule"] + words, done.err)
                self.assertEqual(done.ranks()[0]["env"]["OF_SITE"], value)
            dry = self.run_it("--nodes=1", "--ranks_per_node=1", site, "--dry_run", "--submit", "--", *words,
                              FAKE_MPI_KINDS="pmix")
            self.fakes.calls("sbatch")
            subprocess.run(["bash", "-c", dry.out], env=self.fakes.environment(), stdout=subprocess.PIPE, check=True)
            script = self.fakes.calls("sbatch")[0]["input"]
            ran = subprocess.run(["bash", "-s"], input=script, stdout=subprocess.PIPE, text=True,
                                 env=self.fakes.environment(SLURM_JOB_ID="17"))
            self.assertEqual(json.loads(ran.stdout)["args"], ["--of=rule"] + words)

    def test_dry_runs(self):
        self.make("mpirun", *SLURM)
        site = "--site=" + os.path.abspath(os.path.join(HERE, "site.conf.example"))
        forms = {
            "course_one_node": (["--submit", site, "--nodes=1"], {}),
            "course_two_nodes": (["--submit", site, "--epochs=3", "--name=it's here"], {}),
            "allocation_srun": ([], ALLOCATION),
            "allocation_mpirun": (["--launcher=mpirun"], ALLOCATION),
            "ssh": (["--hosts=a,b"], {}),
            "local": (["--local"], {}),
        }
        for name, (words, environment) in forms.items():
            done = self.run_it("--dry_run", *words, target="test_run_gpus", FAKE_MPI_KINDS="pmix", USER="me", **environment)
            self.assertEqual(done.status, 0, done.err)
            text = re.sub(r"\.[0-9a-f]{12}\b", ".KEY", done.out).replace(self.fakes.home, "HOME")
            text = text.replace(os.environ["TEST_SRCDIR"], "RUNFILES")
            text = re.sub(r"files, [0-9.]+ MB", "files, N MB", text)
            text = re.sub(r"(export OMPI_ALLOW_RUN_AS_ROOT.*\n|-x OMPI_ALLOW_RUN_AS_ROOT\S* \\\n *)", "", text)
            golden = os.path.join(HERE, "testdata", name + ".txt")
            if "UPDATE_GOLDEN" in os.environ:
                with open(os.path.join(os.environ["UPDATE_GOLDEN"], name + ".txt"), "w") as f:
                    f.write(text)
                continue
            with open(golden) as f:
                self.assertEqual(text, f.read(), golden)
        for name in ("srun", "mpirun", "sbatch"):
            self.assertEqual([call for call in self.fakes.calls(name) if call["words"] != ["--mpi=list"]], [])
        self.assertFalse(os.path.exists(self.fakes.stage))


if __name__ == "__main__":
    unittest.main()
