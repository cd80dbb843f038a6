//! Between devices: what one sends waits on the host until the other receives it.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use cubecl::ir::ElemType;
use cubecl_common::bytes::Bytes;
use cubecl_common::device::DeviceId;
use cubecl_common::future::block_on;
use cubecl_common::stream_id::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::{
    ComputeServer, CopyDescriptor, Handle, ServerCommunication, ServerError,
};
use parking_lot::{Condvar, Mutex};

use crate::server::{PoolServer, error};

/// How long a device waits for what another one sends. Both are asked for at once, by one thread.
const PATIENCE: Duration = Duration::from_secs(60);

type Mail = HashMap<(DeviceId, DeviceId), VecDeque<Bytes>>;

static MAIL: Mutex<Option<Mail>> = Mutex::new(None);
static ARRIVED: Condvar = Condvar::new();

impl<R: Runtime> ServerCommunication for PoolServer<R> {
    const SERVER_COMM_ENABLED: bool = true;

    fn comm_init(&mut self, _devices: Vec<DeviceId>) -> Result<(), ServerError> {
        Ok(())
    }

    fn sync_collective(&mut self, _stream: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn send(
        &mut self,
        copy: CopyDescriptor,
        _dtype: ElemType,
        stream: StreamId,
        to: DeviceId,
    ) -> Result<(), ServerError> {
        let size = copy.handle.size_in_used() as usize;
        let flat = CopyDescriptor {
            handle: copy.handle,
            shape: [size].into(),
            strides: [1].into(),
            elem_size: 1,
        };
        let bytes = block_on(self.read(vec![flat], stream))?.remove(0);
        let mut mail = MAIL.lock();
        mail.get_or_insert_default().entry((self.device(), to)).or_default().push_back(bytes);
        ARRIVED.notify_all();
        Ok(())
    }

    fn recv(
        &mut self,
        handle: Handle,
        _dtype: ElemType,
        stream: StreamId,
        from: DeviceId,
    ) -> Result<(), ServerError> {
        let size = handle.size();
        self.initialize_memory(handle.memory.clone(), size, stream);
        let way = (from, self.device());
        let mut mail = MAIL.lock();
        let bytes = loop {
            let arrived = mail.get_or_insert_default().get_mut(&way).and_then(VecDeque::pop_front);
            if let Some(bytes) = arrived {
                break bytes;
            }
            if ARRIVED.wait_for(&mut mail, PATIENCE).timed_out() {
                return Err(error(format!("{from} did not send what {} waits for", way.1)));
            }
        };
        drop(mail);
        let flat = CopyDescriptor {
            handle: handle.binding(),
            shape: [size as usize].into(),
            strides: [1].into(),
            elem_size: 1,
        };
        self.write(vec![(flat, bytes)], stream);
        Ok(())
    }
}
