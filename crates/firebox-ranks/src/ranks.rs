//! The handle that programs hold.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn_backend::{Backend, Device};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::engine::{Alone, Engine, LONGEST};
use crate::error::RankError;

/// How long a rank waits for the others, unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(30 * 60);

/// The ranks of a training: the processes that a launcher such as `mpirun` has started, one for
/// each device. Clones are the same ranks.
///
/// ```
/// use firebox_ranks::Ranks;
///
/// // `Ranks::mpi()?`, with the feature `mpi`.
/// let ranks = Ranks::alone();
/// assert_eq!((ranks.rank(), ranks.world()), (0, 1));
/// ```
#[derive(Clone)]
pub struct Ranks {
    engine: Arc<Mutex<Box<dyn Engine>>>,
    rank: usize,
    world: usize,
    local: (usize, usize),
    patience: Duration,
}

impl Ranks {
    /// This process only.
    pub fn alone() -> Self {
        Self::new(Alone::default())
    }

    /// The processes that an MPI launcher has started. Without a launcher it is this process only.
    ///
    /// Call it once in a process, first thing in `main`: where a launcher starts a process, the
    /// other ranks wait for it. MPI ends when the last clone is dropped. A process that ends before
    /// without an error, as with `std::process::exit`, makes `mpirun` end the others.
    ///
    /// # Errors
    ///
    /// If MPI was started before in this process, or its messages cannot be had.
    #[cfg(feature = "mpi")]
    pub fn mpi() -> Result<Self, RankError> {
        crate::mpi::Mpi::start().map(Self::new)
    }

    /// Ranks that an engine of your own carries.
    pub fn new(engine: impl Engine + 'static) -> Self {
        Self {
            rank: engine.rank(),
            world: engine.world(),
            local: engine.local(),
            engine: Arc::new(Mutex::new(Box::new(engine))),
            patience: PATIENCE,
        }
    }

    /// How long to wait for the other ranks before training fails. Default: 30 minutes, because a
    /// rank may plan or tune kernels while the others wait.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The number of this process, from zero. Rank 0 shows progress and writes logs and
    /// checkpoints.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes train together.
    pub fn world(&self) -> usize {
        self.world
    }

    /// The number of this process among those on the same machine: the index of its device.
    pub fn local_rank(&self) -> usize {
        self.local.0
    }

    /// The device of this process: the default one of the backend `B`, with the index of this
    /// process among those on its machine. Where a launcher shows each process only its own device,
    /// that one.
    ///
    /// On wgpu the default device has no index. Choose one there with
    /// [`local_rank`](Self::local_rank).
    pub fn device<B: Backend>(&self) -> B::Device {
        let mut id = B::Device::default().to_id();
        let count = B::device_count(id.type_id).max(1);
        id.index_id = u16::try_from(self.local_rank() % count).unwrap_or_default();
        B::Device::from_id(id)
    }

    /// How many of the processes run on this machine.
    pub fn local_world(&self) -> usize {
        self.local.1
    }

    /// Whether this is rank 0.
    pub fn is_root(&self) -> bool {
        self.rank == 0
    }

    /// Sends a value to all ranks. Returns the values of all, in the order of the ranks.
    ///
    /// # Errors
    ///
    /// If a rank does not answer in time, has ended, or sends something else than a `T`.
    pub fn tell<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>, RankError> {
        let config = bincode::config::standard().with_limit::<LONGEST>();
        let unexpected = |rank: usize, message: String| RankError::Unexpected { rank, message };
        let word = bincode::serde::encode_to_vec(value, config)
            .map_err(|error| unexpected(self.rank, error.to_string()))?;
        let words = self.with(|engine| engine.control(word, self.patience))?;
        if words.len() != self.world {
            return Err(unexpected(0, "not one message of each rank".to_owned()));
        }
        let decode = |(rank, word): (usize, Vec<u8>)| {
            let decoded = bincode::serde::decode_from_slice(&word, config);
            match decoded {
                Ok((value, read)) if read == word.len() => Ok(value),
                Ok(_) => Err(unexpected(rank, "a message is too long".to_owned())),
                Err(error) => Err(unexpected(rank, error.to_string())),
            }
        };
        words.into_iter().enumerate().map(decode).collect()
    }

    /// Sends bytes from rank 0 to all ranks.
    ///
    /// # Errors
    ///
    /// If it does not end in time.
    pub fn broadcast(&self, bytes: Vec<u8>) -> Result<Vec<u8>, RankError> {
        self.with(|engine| engine.broadcast(bytes, self.patience))
    }

    pub(crate) fn begin_sum(&self, numbers: Vec<f32>) -> Result<(), RankError> {
        self.with(|engine| engine.begin_sum(numbers))
    }

    pub(crate) fn end_sum(&self) -> Result<Vec<f32>, RankError> {
        self.with(|engine| engine.end_sum(self.patience))
    }

    fn with<R>(&self, of: impl FnOnce(&mut dyn Engine) -> R) -> R {
        of(&mut **self.engine.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}
