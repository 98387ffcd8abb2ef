# Cluster `pair` by hand: a line for each node, the head's first.
# Each node needs Docker, bash 4, and scripts/run_cluster.sh with launcher/payload beside it;
# the image needs Ray 2.60.0, which `vlaunch up` would add to it.
# Not carried over: `docker:` (run the script as somebody who may use Docker).
# Before: export VLLM_API_KEY=…
# Before: export HF_TOKEN=…

# gpu01 (10.0.0.1)
scripts/run_cluster.sh --cluster pair --name gpu01 --node-ip 10.0.0.1 --interface bond0 --gpus 8 --rdma --secret VLLM_API_KEY --port gcs=7001 vllm/vllm-openai:v0.32.0 10.0.0.1 --head /data/huggingface --env NCCL_DEBUG=INFO --env NCCL_IB_HCA==mlx5_0 --env NVSHMEM_HCA_LIST=mlx5_0 --env UCX_NET_DEVICES=mlx5_0:1,bond0

# The head's token, to each worker: scp -p ~/.vlaunch/pair/secrets/RAY_AUTH_TOKEN WORKER:ray-token
# gpu02 (10.0.0.2)
scripts/run_cluster.sh --cluster pair --name gpu02 --node-ip 10.0.0.2 --interface bond0 --gpus 8 --rdma --token-file ~/ray-token --secret VLLM_API_KEY --port gcs=7001 vllm/vllm-openai:v0.32.0 10.0.0.1 --worker /data/huggingface --env NCCL_DEBUG=INFO --env NCCL_IB_HCA==mlx5_0 --env NVSHMEM_HCA_LIST=mlx5_0 --env UCX_NET_DEVICES=mlx5_0:1,bond0

# All of them have joined when this says so, on gpu01:
docker exec vlaunch-pair-gpu01 ray status

# The server, on gpu01; `vlaunch serve` from elsewhere keeps one alive.
docker exec vlaunch-pair-gpu01 /opt/vlaunch/entry.sh vllm serve org/m --seed 1 --tensor-parallel-size 8 --pipeline-parallel-size 2 --distributed-executor-backend ray --host 0.0.0.0 --port 8000

# The end, on every node:
scripts/run_cluster.sh --cluster pair --stop
