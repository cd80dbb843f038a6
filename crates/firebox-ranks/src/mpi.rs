//! The engine for processes that an MPI launcher has started.
//!
//! One thread makes all calls of MPI, from its start to its end. The program's threads give it work
//! and wait for answers, so none of them hangs in MPI: a rank that does not answer is an error
//! after a while. Sums are exchanged while the program reads the next numbers.
//!
//! Messages go through rank 0. It waits for those of all others, and sends all of them to everyone,
//! or says who is missing.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{JoinHandle, park, yield_now};
use std::time::{Duration, Instant};

use ::mpi::collective::SystemOperation;
use ::mpi::datatype::Equivalence;
use ::mpi::environment::Universe;
use ::mpi::request::{Request, Scope, scope};
use ::mpi::topology::{Communicator, SimpleCommunicator};
use ::mpi::traits::{CommunicatorCollectives, Destination, MatchedReceiveVec, Root, Source};
use ::mpi::{Threading, initialize_with_threading};

use crate::engine::{Engine, LONGEST};
use crate::error::RankError;

/// The tag of messages.
const TAG: i32 = 1;

/// The bytes that are broadcast at a time.
const CHUNK: usize = 64 << 20;

/// How long a thread that waits for a message only lets others run, before it sleeps in between.
const AWAKE: Duration = Duration::from_millis(2);

/// The shortest and the longest time that it sleeps.
const SLEEPS: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(500));

/// What the thread is to do.
enum Command {
    Control {
        word: Vec<u8>,
        patience: Duration,
    },
    Sum(Vec<f32>),
    Broadcast(Vec<u8>),
    /// All ranks have come to their end.
    End,
}

enum Answer {
    Words(Result<Vec<Vec<u8>>, RankError>),
    Sum(Vec<f32>),
    Bytes(Vec<u8>),
}

/// The numbers of a rank: its own, how many there are, and the same on its machine.
type Numbers = (usize, usize, (usize, usize));

/// MPI, seen from the program's threads.
pub(crate) struct Mpi {
    numbers: Numbers,
    commands: Sender<Command>,
    answers: Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
    /// How many sums were begun and not ended.
    underway: usize,
    failed: bool,
}

impl Mpi {
    /// Starts MPI.
    pub(crate) fn start() -> Result<Self, RankError> {
        let ((commands, work), (answer, answers)) = (channel(), channel());
        let (ready, started) = channel();
        let run = move || {
            let Some((universe, _)) = initialize_with_threading(Threading::Funneled) else {
                return;
            };
            let of_all = universe.world();
            let here = of_all.split_shared(of_all.rank());
            let number = |rank: i32| usize::try_from(rank).unwrap_or_default();
            let local = (number(here.rank()), number(here.size()));
            // On an error, the receiver is gone.
            let _ = ready.send((number(of_all.rank()), number(of_all.size()), local));
            drop(here);
            let left = vec![false; number(of_all.size())];
            Thread { universe, world: of_all, round: 0, left, work, answer }.run();
        };
        let not_started = |text: &str| RankError::NotStarted(text.to_owned());
        let thread = std::thread::Builder::new()
            .name("mpi".to_owned())
            .spawn(run)
            .map_err(|error| RankError::NotStarted(error.to_string()))?;
        let numbers = started.recv().map_err(|_| not_started("it runs already in this process"))?;
        Ok(Self { numbers, commands, answers, thread: Some(thread), underway: 0, failed: false })
    }

    fn ask(&mut self, command: Command) -> Result<(), RankError> {
        if self.failed || self.commands.send(command).is_err() {
            return Err(RankError::Failed);
        }
        Ok(())
    }

    fn answer(&mut self, patience: Duration, late: RankError) -> Result<Answer, RankError> {
        let answer = self.answers.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => late,
            RecvTimeoutError::Disconnected => RankError::Failed,
        });
        self.failed |= answer.is_err();
        answer
    }

    /// What there is to say after an answer to another question.
    fn mixed_up(&mut self) -> RankError {
        self.failed = true;
        RankError::Failed
    }
}

impl Engine for Mpi {
    fn rank(&self) -> usize {
        self.numbers.0
    }

    fn world(&self) -> usize {
        self.numbers.1
    }

    fn local(&self) -> (usize, usize) {
        self.numbers.2
    }

    fn control(&mut self, word: Vec<u8>, patience: Duration) -> Result<Vec<Vec<u8>>, RankError> {
        if self.underway > 0 {
            return Err(self.mixed_up());
        }
        self.ask(Command::Control { word, patience })?;
        // Rank 0 notices first who is missing. Whoever hears nothing from it misses rank 0.
        let waited = patience.saturating_mul(2);
        let late = match self.rank() {
            0 => RankError::Stuck { waited },
            _ => RankError::Missing { missing: vec![0], waited },
        };
        match self.answer(waited, late)? {
            Answer::Words(words) => {
                // Otherwise all ranks have heard of it, and come to their end.
                self.failed |= matches!(words, Err(RankError::Missing { .. }));
                words
            }
            Answer::Sum(_) | Answer::Bytes(_) => Err(self.mixed_up()),
        }
    }

    fn begin_sum(&mut self, numbers: Vec<f32>) -> Result<(), RankError> {
        self.ask(Command::Sum(numbers))?;
        self.underway += 1;
        Ok(())
    }

    fn end_sum(&mut self, patience: Duration) -> Result<Vec<f32>, RankError> {
        match self.answer(patience, RankError::Stuck { waited: patience })? {
            Answer::Sum(sums) => {
                self.underway -= 1;
                Ok(sums)
            }
            Answer::Words(_) | Answer::Bytes(_) => Err(self.mixed_up()),
        }
    }

    fn broadcast(&mut self, bytes: Vec<u8>, patience: Duration) -> Result<Vec<u8>, RankError> {
        self.ask(Command::Broadcast(bytes))?;
        match self.answer(patience, RankError::Stuck { waited: patience })? {
            Answer::Bytes(bytes) => Ok(bytes),
            Answer::Words(_) | Answer::Sum(_) => Err(self.mixed_up()),
        }
    }
}

impl Drop for Mpi {
    /// Ends MPI, which waits for all ranks. After a failure, or while this process panics, nobody
    /// would come: MPI is left as it is, and the launcher ends the job when this process ends.
    fn drop(&mut self) {
        let is_lost = self.failed || self.underway > 0 || std::thread::panicking();
        if is_lost || self.commands.send(Command::End).is_err() {
            return;
        }
        // A panic of that thread has nothing to say any more.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The thread that calls MPI.
struct Thread {
    universe: Universe,
    world: SimpleCommunicator,
    /// How many rounds of messages there were.
    round: u64,
    /// The ranks that have come to their end: at rank 0 all, at the others rank 0.
    left: Vec<bool>,
    work: Receiver<Command>,
    answer: Sender<Answer>,
}

impl Thread {
    fn run(mut self) {
        while let Ok(command) = self.work.recv() {
            let answer = match command {
                Command::Control { word, patience } => Answer::Words(self.control(&word, patience)),
                Command::Sum(numbers) => Answer::Sum(self.sum(&numbers)),
                Command::Broadcast(bytes) => Answer::Bytes(self.broadcast(bytes)),
                Command::End => return self.end(),
            };
            // The program may have stopped waiting.
            let _ = self.answer.send(answer);
        }
        // The program has failed, and the other ranks do not come to an end with this one.
        loop {
            park();
        }
    }

    /// Says goodbye, in case that others still wait for this rank, and ends MPI.
    fn end(self) {
        let (rank, world) = (self.rank(), self.world());
        if rank == 0 {
            let left = Frame::Verdict(self.round, Err(RankError::Left { left: vec![0] }));
            (1..world).for_each(|other| self.send(other, &left));
        } else {
            self.send(0, &Frame::Left);
        }
        // No message may be left when MPI ends. The others come to their end as well.
        let mut pause = Pause::new();
        let mut waits_for: Vec<usize> = match rank {
            0 => (1..world).filter(|other| !self.left[*other]).collect(),
            _ => (0..1).filter(|root| !self.left[*root]).collect(),
        };
        while !waits_for.is_empty() {
            waits_for.retain(|other| match self.receive(*other) {
                Ok(Some(Frame::Left)) => false,
                Ok(Some(Frame::Verdict(_, Err(RankError::Left { left })))) => !left.contains(&0),
                Ok(_) => true,
                Err(_) => false,
            });
            pause.rest();
        }
        drop(self.universe);
    }

    fn rank(&self) -> usize {
        usize::try_from(self.world.rank()).unwrap_or_default()
    }

    fn world(&self) -> usize {
        usize::try_from(self.world.size()).unwrap_or_default()
    }

    fn control(&mut self, word: &[u8], patience: Duration) -> Result<Vec<Vec<u8>>, RankError> {
        let round = self.round;
        self.round += 1;
        if self.rank() == 0 {
            let verdict = self.gather(round, word, patience);
            let frame = Frame::Verdict(round, verdict);
            (1..self.world()).for_each(|other| self.send(other, &frame));
            let Frame::Verdict(_, verdict) = frame else { unreachable!("it was made above") };
            return verdict;
        }
        self.send(0, &Frame::Word(round, word.to_vec()));
        let mut pause = Pause::new();
        loop {
            match self.receive(0)? {
                Some(Frame::Verdict(of, verdict)) if of == round || verdict.is_err() => {
                    if let Err(RankError::Left { left }) = &verdict {
                        self.left[0] |= left.contains(&0);
                    }
                    return verdict;
                }
                Some(_) => return Err(unexpected(0, "a message of another round")),
                None => pause.rest(),
            }
        }
    }

    /// At rank 0: the messages of all ranks in a round.
    fn gather(
        &mut self,
        round: u64,
        word: &[u8],
        patience: Duration,
    ) -> Result<Vec<Vec<u8>>, RankError> {
        let mut words: Vec<Option<Vec<u8>>> = vec![None; self.world()];
        words[0] = Some(word.to_vec());
        let (began, mut pause) = (Instant::now(), Pause::new());
        loop {
            let missing: Vec<usize> =
                (0..words.len()).filter(|rank| words[*rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(words.into_iter().flatten().collect());
            }
            let mut left = Vec::new();
            let mut heard = false;
            for rank in missing.iter().copied() {
                match self.receive(rank)? {
                    Some(Frame::Word(of, word)) if of == round => words[rank] = Some(word),
                    Some(Frame::Left) => {
                        self.left[rank] = true;
                        left.push(rank);
                    }
                    Some(_) => return Err(unexpected(rank, "a message of another round")),
                    None => continue,
                }
                heard = true;
            }
            if !left.is_empty() {
                return Err(RankError::Left { left });
            }
            match heard {
                true => pause = Pause::new(),
                false if began.elapsed() >= patience => {
                    return Err(RankError::Missing { missing, waited: patience });
                }
                false => pause.rest(),
            }
        }
    }

    fn send(&self, to: usize, frame: &Frame) {
        let bytes = frame.encode();
        self.world.process_at_rank(to as i32).send_with_tag(bytes.as_slice(), TAG);
    }

    /// The next message from a rank, if there is one.
    fn receive(&self, from: usize) -> Result<Option<Frame>, RankError> {
        let process = self.world.process_at_rank(from as i32);
        let Some(message) = process.immediate_matched_probe_with_tag(TAG) else {
            return Ok(None);
        };
        let length = usize::try_from(message.1.count(u8::equivalent_datatype()));
        // A verdict has the messages of all ranks.
        let longest = (LONGEST + HEAD) * self.world();
        if length.is_ok_and(|length| length > longest) {
            return Err(unexpected(from, "a message that is too long"));
        }
        let (bytes, _) = message.matched_receive_vec::<u8>();
        Frame::decode(&bytes).map(Some).ok_or_else(|| unexpected(from, "a damaged message"))
    }

    fn sum(&self, numbers: &[f32]) -> Vec<f32> {
        let mut sums = vec![0.0; numbers.len()];
        scope(|scope| {
            let operation = SystemOperation::sum();
            let request =
                self.world.immediate_all_reduce_into(scope, numbers, &mut sums[..], operation);
            complete(request);
        });
        sums
    }

    fn broadcast(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        let is_root = self.rank() == 0;
        let root = self.world.process_at_rank(0);
        let mut length = bytes.len() as u64;
        scope(|scope| complete(root.immediate_broadcast_into(scope, &mut length)));
        if !is_root {
            bytes.clear();
        }
        let mut done = 0;
        while (done as u64) < length {
            let next = CHUNK.min(usize::try_from(length - done as u64).unwrap_or(CHUNK));
            if !is_root {
                bytes.resize(done + next, 0);
            }
            let chunk = &mut bytes[done..done + next];
            scope(|scope| complete(root.immediate_broadcast_into(scope, chunk)));
            done += next;
        }
        bytes
    }
}

/// Waits for a request. Others may compute on the same core meanwhile.
fn complete<'a, D: ?Sized, S: Scope<'a>>(mut request: Request<'a, D, S>) {
    while let Err(incomplete) = request.test() {
        request = incomplete;
        yield_now();
    }
}

/// The pauses of a thread that waits for a message.
struct Pause {
    since: Instant,
    sleep: Duration,
}

impl Pause {
    fn new() -> Self {
        Self { since: Instant::now(), sleep: SLEEPS.0 }
    }

    /// Lets others run, or sleeps, longer each time.
    fn rest(&mut self) {
        if self.since.elapsed() < AWAKE {
            return yield_now();
        }
        std::thread::sleep(self.sleep);
        self.sleep = (self.sleep * 2).min(SLEEPS.1);
    }
}

fn unexpected(rank: usize, message: &str) -> RankError {
    RankError::Unexpected { rank, message: message.to_owned() }
}

/// The most bytes of a message besides what the program says.
const HEAD: usize = 64;

/// A message as it is sent.
#[derive(serde::Serialize, serde::Deserialize)]
enum Frame {
    /// To rank 0: what a rank says in a round.
    Word(u64, Vec<u8>),
    /// To rank 0: the rank has ended.
    Left,
    /// From rank 0: what all ranks said in a round, or why they cannot go on.
    Verdict(u64, Result<Vec<Vec<u8>>, RankError>),
}

impl Frame {
    fn encode(&self) -> Vec<u8> {
        bincode::serde::encode_to_vec(self, bincode::config::standard())
            .expect("a message in memory can be encoded")
    }

    /// None if the bytes are not those of a message. Lengths in it are not believed.
    fn decode(bytes: &[u8]) -> Option<Self> {
        // No list in it is longer than the message.
        let (frame, read) =
            bincode::serde::decode_from_slice(bytes, bincode::config::standard()).ok()?;
        (read == bytes.len()).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_messages_are_noticed() {
        let whole = Frame::Verdict(7, Ok(vec![vec![1, 2, 3], Vec::new()])).encode();
        assert!(matches!(
            Frame::decode(&whole),
            Some(Frame::Verdict(7, Ok(words))) if words == [vec![1, 2, 3], vec![]]
        ));
        for cut in 0..whole.len() {
            assert!(Frame::decode(&whole[..cut]).is_none(), "the first {cut} bytes");
        }
        let longer: Vec<u8> = whole.iter().copied().chain([0]).collect();
        assert!(Frame::decode(&longer).is_none());
        // A list that says it has 2^62 elements.
        assert!(Frame::decode(&[2, 7, 0, 253, 0, 0, 0, 0, 0, 0, 0, 64]).is_none());
    }
}
